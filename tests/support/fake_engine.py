"""A scripted engine with AsyncEngine's face: no model, the next token computable by hand, delays as told.

Token i of every output is id 10 + i % 200 and text `w<i> `; a request has `max_tokens` of them, else `num_tokens`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import fields

from prometheus_client import CollectorRegistry

from jserve.config import Config
from jserve.engine.info import Loads, ModelInfo
from jserve.request import (
    Code,
    FinishReason,
    GenerateRequest,
    GenerateUpdate,
    OutputDelta,
    PositionLogprobs,
    RequestError,
    RequestMetrics,
    TokenLogprob,
    Usage,
)


def token_id(position: int) -> int:
    return 10 + position % 200


def token_text(position: int) -> str:
    return f"w{position} "


def whole_text(num_tokens: int) -> str:
    return "".join(map(token_text, range(num_tokens)))


class FakeTokenizer:
    """A token is a byte of UTF-8; 256 is BOS."""

    chat_template = "fake"

    def encode(
        self, text: str, *, add_special: bool, parse_special: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        return [256] * add_special + list(text.encode())

    def encode_with_offsets(self, text: str, *, add_special: bool) -> tuple[list[int], list[tuple[int, int]]]:
        spans = [(at, at + 1) for at, character in enumerate(text) for _ in character.encode()]
        return self.encode(text, add_special=add_special), [(0, 0)] * add_special + spans

    def encode_chat(
        self, messages, add_generation_prompt: bool = True, tools=None, max_tokens: int | None = None
    ) -> list[int]:
        if messages[0].role == "nobody":
            raise ValueError("the template knows no role 'nobody'")
        turns = "".join(f"<{message.role}>{message.content}" for message in messages)
        shown = "".join(f"[{tool['function']['name']}]" for tool in tools or ())
        return list((shown + turns + "<assistant>" * add_generation_prompt).encode())

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        special = "" if skip_special_tokens else "<s>"
        return b"".join(special.encode() if i == 256 else bytes([i]) for i in ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return b"<s>" if token_id == 256 else bytes([token_id])

    def is_special(self, token_id: int) -> bool:
        return token_id == 256

    def token_text(self, token_id: int) -> str:
        return "<s>" if token_id == 256 else bytes([token_id]).decode("utf-8", "replace")


MODEL_INFO = ModelInfo(
    tokenizer=FakeTokenizer(), name="fake-model", path="/models/fake", family="fake", num_parameters=12345,
    context_length=4096, vocab_size=257, bos_token_id=256, eos_token_ids=(2, 1), dtype="float32", kv_dtype="bfloat16",
    block_size=32, num_blocks=100, max_num_seqs=64, max_num_batched_tokens=512,
    generation_defaults={"temperature": 0.6, "top_k": 40}, capabilities={"seed": True, "beam_width": False},
    has_chat_template=True, digest="d1gest", platform="cpu", devices=("cpu:0",), attention="none",
)


class FakeEngine:
    """`running` and `waiting` hold request ids; `aborted` those whose stream was closed or cancelled before its end."""

    def __init__(self, *, step_s: float = 0.0, num_tokens: int = 5, max_running: int = 10**6,
                 max_waiting: int = 10**6):
        self.info = MODEL_INFO
        self.config = Config().replace("model", dtype="float32")
        self.metrics_registry = CollectorRegistry()
        self.state = "ready"
        self.step_s = step_s
        self.num_tokens = num_tokens
        self.max_waiting = max_waiting
        self.requests: list[GenerateRequest] = []
        self.running: set[str] = set()
        self.waiting: set[str] = set()
        self.finished: list[str] = []
        self.aborted: list[str] = []
        self.generated_tokens = 0
        self.violations: list[str] = []
        self.failures: dict[str, tuple[int, Exception]] = {}
        """By prompt: after how many tokens generate raises, and what."""
        self.go = asyncio.Event()
        """Cleared: no request makes a step."""
        self.go.set()
        self._slots = asyncio.Semaphore(max_running)
        self._to_abort: set[str] = set()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateUpdate, None]:
        if self.state != "ready":
            raise RequestError(Code.UNAVAILABLE, f"the engine is {self.state}")
        if len(self.waiting) >= self.max_waiting:
            raise RequestError(Code.RESOURCE_EXHAUSTED, f"{self.max_waiting} requests are waiting", retry_after_s=2.5)
        name = request.request_id
        if name in self.running | self.waiting:
            raise RequestError(Code.ALREADY_EXISTS, f"request_id = {name!r}: is running", field="request_id")
        self.requests.append(request)
        arrival = time.time()
        try:
            self.waiting.add(name)
            async with self._slots:
                self.waiting.discard(name)
                self.running.add(name)
                async for update in self._steps(request, arrival):
                    yield update
                self.finished.append(name)
        finally:
            if name not in self.finished:
                self.aborted.append(name)
            self.running.discard(name)
            self.waiting.discard(name)

    async def _steps(self, request: GenerateRequest, arrival: float) -> AsyncGenerator[GenerateUpdate, None]:
        params, name = request.sampling_params, request.request_id
        num_tokens = self.num_tokens if params.max_tokens is None else params.max_tokens
        num_outputs = params.n or 1
        fail_at, failure = self.failures.get(request.prompt, (-1, None))
        first_scheduled = time.time()
        if params.prompt_logprobs is not None:
            yield GenerateUpdate(name, prompt_logprobs=_prompt_logprobs(request, params.prompt_logprobs))
        for position in range(num_tokens):
            await self.go.wait()
            await asyncio.sleep(self.step_s)
            if position == fail_at:
                raise failure
            was_aborted = name in self._to_abort
            is_last = was_aborted or position == num_tokens - 1
            reason = (FinishReason.ABORTED if was_aborted else FinishReason.LENGTH) if is_last else None
            self.generated_tokens += num_outputs
            update = GenerateUpdate(name, [
                OutputDelta(
                    index, token_text(position), [token_id(position)],
                    logprobs=None if params.logprobs is None else [_logprobs(position, params.logprobs)],
                    finish_reason=reason, cumulative_logprob=-0.5 * (position + 1) if is_last else None)
                for index in range(num_outputs)
            ])
            if is_last:
                num_prompt = len(request.prompt or request.prompt_token_ids or request.messages or ())
                update.usage = Usage(num_prompt, num_outputs * (position + 1), 0)
                update.metrics = RequestMetrics(arrival, first_scheduled, first_scheduled, time.time(),
                                                first_scheduled - arrival, 0)
            yield update
            if is_last:
                return

    async def abort(self, request_id: str) -> bool:
        if request_id not in self.running | self.waiting:
            return False
        self._to_abort.add(request_id)
        return True

    def loads(self) -> Loads:
        """The true counts of what this engine has; the other fields are their place in Loads, all different."""
        known = {"num_running": len(self.running), "num_waiting": len(self.waiting), "kv_usage": 0.25,
                 "generated_tokens": self.generated_tokens}
        return Loads(**{item.name: known.get(item.name, 100 + at) for at, item in enumerate(fields(Loads))})

    async def flush_cache(self) -> int:
        return 7

    async def check_integrity(self) -> list[str]:
        return self.violations

    async def start_profile(self, folder, num_steps) -> str:
        return f"{folder}:{num_steps}"

    async def stop_profile(self) -> str:
        raise RequestError(Code.FAILED_PRECONDITION, "no profile is running")

    def begin_drain(self) -> None:
        self.state = "draining"

    async def close(self) -> None:
        self.state = "stopped"


def _logprobs(position: int, k: int) -> PositionLogprobs:
    entries = tuple(
        TokenLogprob(token_id(position) + rank, -0.5 * (rank + 1), rank + 1, f"t{rank}", bytes([0xFF, rank]))
        for rank in range(max(k, 1))
    )
    return PositionLogprobs(entries[0], entries)


def _prompt_logprobs(request: GenerateRequest, k: int) -> list[PositionLogprobs | None]:
    num_tokens = len(request.prompt or request.prompt_token_ids or request.messages)
    return [None, *(_logprobs(position, k) for position in range(1, num_tokens))]
