"""Updates of one request on their way from the engine to the wire.

The engine never waits for a reader: `add` always succeeds, and while the reader is slow the deltas of an output merge
into one.  End and errors come through the same door, after all data.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from jserve.request import GenerateUpdate, OutputDelta, PositionLogprobs, RequestMetrics, Usage


@dataclass
class _PendingOutput:
    """Deltas of one index that have not been taken."""

    deltas: list[OutputDelta] = field(default_factory=list)
    num_tokens: int = 0
    was_taken_before: bool = False

    def is_ready(self, interval: int) -> bool:
        if not self.deltas:
            return False
        return not self.was_taken_before or self.num_tokens >= interval or self.deltas[-1].finish_reason is not None


class Coalescer:
    """One producer calls `add` and then `finish`; one consumer calls `next` until it gives None or raises."""

    def __init__(self, interval: int = 1):
        """A delta waits until it has `interval` tokens, unless it is the first or the last of its index."""
        self._interval = interval
        self._outputs: dict[int, _PendingOutput] = {}
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        self._embedding: list[float] | None = None
        self._request_id = ""
        self._usage: Usage | None = None
        self._metrics: RequestMetrics | None = None
        self._has_usage = False
        self._is_finished = False
        self._error: BaseException | None = None
        self._changed = asyncio.Event()

    @property
    def has_usage(self) -> bool:
        """The update that ends the stream has been added."""
        return self._has_usage

    def add(self, update: GenerateUpdate) -> None:
        self._request_id = update.request_id
        for delta in update.outputs:
            pending = self._outputs.setdefault(delta.index, _PendingOutput())
            pending.deltas.append(delta)
            pending.num_tokens += len(delta.token_ids)
        if update.prompt_logprobs is not None:
            self._prompt_logprobs = (self._prompt_logprobs or []) + update.prompt_logprobs
        if update.embedding is not None:
            self._embedding = update.embedding
        if update.usage is not None:
            self._usage, self._metrics, self._has_usage = update.usage, update.metrics, True
        self._changed.set()

    def finish(self, error: BaseException | None = None) -> None:
        """No more updates; the consumer gets `error` once it has taken the data.  Only the first call counts."""
        if not self._is_finished:
            self._is_finished, self._error = True, error
            self._changed.set()

    async def next(self) -> GenerateUpdate | None:
        """What has come since the last call, waiting for something; None at the end."""
        while True:
            update = self._take(everything=self._is_finished or self._has_usage)
            if update is not None:
                return update
            if self._is_finished:
                return self._end()
            self._changed.clear()
            await self._changed.wait()

    async def whole(self) -> GenerateUpdate:
        """The whole result in one update, once it is there."""
        while not self._is_finished:
            self._changed.clear()
            await self._changed.wait()
        self._end()
        return self._take(everything=True) or GenerateUpdate(self._request_id)

    def _end(self) -> None:
        if self._error is not None:
            raise self._error

    def _take(self, everything: bool) -> GenerateUpdate | None:
        outputs = []
        for pending in self._outputs.values():
            if pending.is_ready(1 if everything else self._interval) or (everything and pending.deltas):
                outputs.append(merge(pending.deltas))
                pending.deltas, pending.num_tokens, pending.was_taken_before = [], 0, True
        if not outputs and self._prompt_logprobs is None and self._usage is None:
            return None
        update = GenerateUpdate(
            self._request_id, outputs, self._prompt_logprobs, self._embedding, self._usage, self._metrics
        )
        self._prompt_logprobs = self._embedding = self._usage = self._metrics = None
        return update


def merge(deltas: list[OutputDelta]) -> OutputDelta:
    """Consecutive deltas of one index as one."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    with_logprobs = any(delta.logprobs is not None for delta in deltas)
    return OutputDelta(
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        logprobs=[entry for delta in deltas for entry in delta.logprobs or ()] if with_logprobs else None,
        finish_reason=last.finish_reason,
        matched_stop=last.matched_stop,
        cumulative_logprob=last.cumulative_logprob,
    )
