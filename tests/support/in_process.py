"""The scripted engine as a front end in this process meets it: ids made by the engine, counters, a known tokenizer."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import AsyncGenerator

from jserve.engine.info import Loads
from jserve.request import GenerateRequest, GenerateUpdate, invalid
from tests.support.fake_engine import MODEL_INFO, FakeEngine, FakeTokenizer


class ByteTokenizer(FakeTokenizer):
    vocab_size = 257

    def is_special(self, token_id: int) -> bool:
        return token_id == 256


class InProcessEngine(FakeEngine):
    """Makes request ids, refuses the prompt `refuse me`, counts 3 padded tokens for each scheduled one."""

    def __init__(self, *, max_num_seqs: int = 4, **options):
        super().__init__(**options)
        self.tokenizer = ByteTokenizer()
        self.info = dataclasses.replace(MODEL_INFO, tokenizer=self.tokenizer, max_num_seqs=max_num_seqs)
        self.most_open = 0
        self.closed = False
        self._numbers = itertools.count()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateUpdate, None]:
        if request.prompt == "refuse me":
            raise invalid("prompt", request.prompt, "refused")
        request = dataclasses.replace(request, request_id=request.request_id or f"req-{next(self._numbers)}")
        async for update in super().generate(request):
            self.most_open = max(self.most_open, len(self.running) + len(self.waiting))
            yield update

    async def tokenize(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special=True)

    def loads(self) -> Loads:
        scheduled = self.generated_tokens
        counted = {"scheduled_tokens": scheduled, "padded_tokens": 3 * scheduled, "compiles_after_ready": 0}
        return dataclasses.replace(super().loads(), **counted)

    async def close(self) -> None:
        self.closed = True


def start_with(engine: InProcessEngine, monkeypatch, *modules) -> InProcessEngine:
    """Every front end in `modules` gets `engine` where it would have built one; its config is kept on the engine."""

    async def start_engine(config, report):
        engine.config = config
        report.line("starting")
        return engine

    for module in modules:
        monkeypatch.setattr(module, "start_engine", start_engine)
    return engine
