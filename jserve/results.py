"""A request's stream of updates joined into one result, for front ends that answer whole."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from jserve.request import GenerateRequest, GenerateUpdate, OutputDelta, PositionLogprobs, RequestMetrics, Usage


@dataclass
class CompletionOutput:
    """One of the n outputs of a request."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    """stop, length or aborted."""
    matched_stop: int | str | None = None
    """The stop id or stop string that ended it; None after EOS."""
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None


@dataclass
class RequestOutput:
    """What one prompt gave."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    usage: Usage | None = None
    metrics: RequestMetrics | None = None


async def collect(request: GenerateRequest, updates: AsyncIterator[GenerateUpdate]) -> RequestOutput:
    """Joins the stream of one request.  Raises what the stream raises."""
    outputs: dict[int, CompletionOutput] = {}
    result = RequestOutput("", request.prompt, [], [])
    async for update in updates:
        result.request_id = update.request_id
        if update.prompt_logprobs is not None:
            result.prompt_logprobs = (result.prompt_logprobs or []) + update.prompt_logprobs
        for delta in update.outputs:
            _append(outputs.setdefault(delta.index, CompletionOutput(delta.index)), delta)
        if update.usage is not None:
            result.usage, result.metrics = update.usage, update.metrics
    result.outputs = [outputs[index] for index in sorted(outputs)]
    return result


def _append(output: CompletionOutput, delta: OutputDelta) -> None:
    output.text += delta.text
    output.token_ids += delta.token_ids
    if delta.logprobs is not None:
        output.logprobs = (output.logprobs or []) + delta.logprobs
    if delta.finish_reason is not None:
        output.finish_reason = delta.finish_reason.value
        output.matched_stop = delta.matched_stop
        output.cumulative_logprob = delta.cumulative_logprob
