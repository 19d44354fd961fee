"""One request's updates on their way from the output thread to its asyncio reader.

What waits for a slow reader is merged, so that a slow reader costs one pending update and slows nobody.  The end, or the
error, travels in the same queue as the data.
"""

from __future__ import annotations

import asyncio

from jserve.request import GenerateUpdate, OutputDelta, RequestError


class Channel:
    """Written through `deliver` from any thread, read by one coroutine."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._waiting: list[GenerateUpdate | RequestError] = []
        self._arrived = asyncio.Event()

    def put(self, item: GenerateUpdate | RequestError) -> None:
        """On the reader's event loop."""
        self._waiting.append(item)
        self._arrived.set()

    async def get(self) -> GenerateUpdate:
        """All that has arrived, as one update.  Raises the RequestError that ended the request."""
        await self._arrived.wait()
        if isinstance(self._waiting[0], RequestError):
            raise self._waiting[0]
        merged = self._waiting.pop(0)
        while self._waiting and not isinstance(self._waiting[0], RequestError):
            merge(merged, self._waiting.pop(0))
        if not self._waiting:
            self._arrived.clear()
        return merged


def deliver(items: list[tuple[Channel, GenerateUpdate | RequestError]]) -> None:
    """Hands updates to their readers with one wake-up per event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Channel, GenerateUpdate | RequestError]]] = {}
    for channel, item in items:
        by_loop.setdefault(channel.loop, []).append((channel, item))
    for loop, batch in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put_all, batch)
        except RuntimeError:
            pass  # the loop is closed: its readers are gone


def _put_all(batch: list[tuple[Channel, GenerateUpdate | RequestError]]) -> None:
    for channel, item in batch:
        channel.put(item)


def merge(first: GenerateUpdate, second: GenerateUpdate) -> None:
    """Appends `second` to `first`, output by output."""
    by_index = {delta.index: delta for delta in first.outputs}
    for delta in second.outputs:
        known = by_index.get(delta.index)
        if known is None:
            first.outputs.append(delta)
            by_index[delta.index] = delta
        else:
            _merge_delta(known, delta)
    first.prompt_logprobs = first.prompt_logprobs if second.prompt_logprobs is None else second.prompt_logprobs
    first.embedding = second.embedding or first.embedding
    first.usage = second.usage or first.usage
    first.metrics = second.metrics or first.metrics


def _merge_delta(first: OutputDelta, second: OutputDelta) -> None:
    first.text += second.text
    first.token_ids.extend(second.token_ids)
    if second.logprobs is not None:
        first.logprobs = (first.logprobs or []) + second.logprobs
    first.finish_reason = second.finish_reason or first.finish_reason
    first.matched_stop = first.matched_stop if second.matched_stop is None else second.matched_stop
    if second.cumulative_logprob is not None:
        first.cumulative_logprob = second.cumulative_logprob
