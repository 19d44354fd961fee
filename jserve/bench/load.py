"""Loads: which requests a bench sends and when, and what it records of their streams.

The requests know token ids only, so that lengths are exact.  Works with anything that has `generate(request)`.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jserve.bench.report import RequestRecord
from jserve.config import ConfigError
from jserve.request import GenerateRequest, RequestError, SamplingParams


@dataclass(frozen=True)
class RandomLoad:
    """Prompts of random ordinary token ids: no two runs share a prefix, unless they name the same seed."""

    num_prompts: int
    input_len: int
    output_len: int
    range_ratio: float = 0.0
    """Lengths are uniform in len * (1 - ratio) .. len * (1 + ratio)."""
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int | None = None
    """None: drawn from the system."""

    def checked(self, context_length: int) -> RandomLoad:
        """Itself with a seed; ConfigError where the longest request cannot fit the model's context."""
        longest = int((self.input_len + self.output_len) * (1 + self.range_ratio))
        if longest > context_length:
            raise ConfigError(
                f"--random-input-len {self.input_len} + --random-output-len {self.output_len} can be {longest} tokens;"
                f" the model's context is {context_length}"
            )
        seed = secrets.randbits(48) if self.seed is None else self.seed
        return RandomLoad(**{**self.__dict__, "seed": seed})

    def requests(self, token_ids: Sequence[int]) -> list[GenerateRequest]:
        """The measured requests, prompts drawn from `token_ids`."""
        return self._draw(self.num_prompts, random.Random(f"run {self.seed}"), token_ids)

    def warm_ups(self, count: int, token_ids: Sequence[int]) -> list[GenerateRequest]:
        """Requests of the same kind that share no prompt with the measured ones."""
        return self._draw(count, random.Random(f"warm-up {self.seed}"), token_ids)

    def _draw(self, count: int, draw: random.Random, token_ids: Sequence[int]) -> list[GenerateRequest]:
        return [
            GenerateRequest(
                prompt_token_ids=draw.choices(token_ids, k=self._length(draw, self.input_len)),
                sampling_params=SamplingParams(
                    temperature=self.temperature,
                    max_tokens=self._length(draw, self.output_len),
                    ignore_eos=self.ignore_eos,
                    seed=draw.getrandbits(31) if self.temperature > 0 else None,
                ),
            )
            for _ in range(count)
        ]

    def _length(self, draw: random.Random, length: int) -> int:
        return draw.randint(max(1, int(length * (1 - self.range_ratio))), max(1, int(length * (1 + self.range_ratio))))


def ordinary_token_ids(info) -> list[int]:
    """Ids of the model's vocabulary that stand for text; control tokens could end or reshape a prompt."""
    special = set(info.eos_token_ids)
    return [i for i in range(info.tokenizer.vocab_size) if i not in special and not info.tokenizer.is_special(i)]


async def run_closed(
    engine,
    requests: Iterable[GenerateRequest],
    concurrency: int,
    on_done: Callable[[RequestRecord], None] = lambda record: None,
) -> list[RequestRecord]:
    """Keeps `concurrency` requests open until all have been answered; records in the order of `requests`."""
    numbered = enumerate(requests)
    records: dict[int, RequestRecord] = {}

    async def client() -> None:
        for number, request in numbered:
            records[number] = await measure(engine, request)
            on_done(records[number])

    clients = [asyncio.ensure_future(client()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*clients)
    finally:
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return [records[number] for number in sorted(records)]


async def measure(engine, request: GenerateRequest) -> RequestRecord:
    """Sends one request and notes when its tokens come.  A failure becomes part of the record."""
    arrivals: list[tuple[float, int]] = []
    usage, finished, error = None, False, None
    start = time.perf_counter()
    try:
        async for update in engine.generate(request):
            count = sum(len(output.token_ids) for output in update.outputs)
            if count:
                arrivals.append((time.perf_counter(), count))
            finished |= any(output.finish_reason is not None for output in update.outputs)
            usage = update.usage or usage
    except RequestError as refusal:
        error = refusal.code.value
    end = time.perf_counter()
    if error is None and not arrivals:
        error = "empty"
    elif error is None and not finished:
        error = "cut"
    return RequestRecord(
        prompt_tokens=usage.prompt_tokens if usage else len(request.prompt_token_ids or ()),
        start=start,
        arrivals=tuple(arrivals),
        end=end,
        cached_tokens=usage.cached_tokens if usage else 0,
        error=error,
    )
