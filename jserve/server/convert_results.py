"""Results: GenerateUpdate <-> the response protos of jserve.v1, both directions (requests: convert).

One update becomes one message for each output, more where many logprobs have to travel.  Knows no gRPC.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from jserve.proto_gen import inference_pb2 as pb
from jserve.request import (
    FinishReason,
    GenerateUpdate,
    OutputDelta,
    PositionLogprobs,
    RequestMetrics,
    TokenLogprob,
    Usage,
)

POSITIONS_PER_MESSAGE = 256
"""Most positions with logprobs in one message of a stream: it stays small, and building it does not hold up others."""

_USAGE_FIELDS = tuple(field.name for field in dataclasses.fields(Usage))
_METRICS_FIELDS = tuple(field.name for field in dataclasses.fields(RequestMetrics))


def update_to_protos(update: GenerateUpdate) -> Iterator[pb.GenerateResponse]:
    """The messages of one update, in order; the last carries usage and metrics where the update has them."""
    last = None
    for message in _messages_of(update):
        if last is not None:
            yield last
        last = message
    if last is None:
        last = pb.GenerateResponse(request_id=update.request_id)
    _set_ending(last, update)
    yield last


def update_from_proto(message: pb.GenerateResponse) -> GenerateUpdate:
    return GenerateUpdate(
        request_id=message.request_id,
        outputs=[_output_from_proto(message)] if message.HasField("index") else [],
        prompt_logprobs=_positions_from_proto(message.prompt_logprobs),
        **_ending(message),
    )


def result_to_proto(update: GenerateUpdate) -> pb.GenerateUnaryResponse:
    """A whole result: an update in which every output is complete."""
    message = pb.GenerateUnaryResponse(request_id=update.request_id)
    for delta in sorted(update.outputs, key=lambda delta: delta.index):
        output = message.outputs.add()
        _fill_output(output, delta, delta.token_ids, delta.logprobs, text=delta.text, is_last=True)
    message.prompt_logprobs.extend(map(_position_to_proto, update.prompt_logprobs or ()))
    _set_ending(message, update)
    return message


def result_from_proto(message: pb.GenerateUnaryResponse) -> GenerateUpdate:
    return GenerateUpdate(
        request_id=message.request_id,
        outputs=[_output_from_proto(output) for output in message.outputs],
        prompt_logprobs=_positions_from_proto(message.prompt_logprobs),
        **_ending(message),
    )


def _messages_of(update: GenerateUpdate) -> Iterator[pb.GenerateResponse]:
    for piece in _pieces(update.prompt_logprobs):
        yield pb.GenerateResponse(request_id=update.request_id, prompt_logprobs=map(_position_to_proto, piece))
    for delta in update.outputs:
        if not delta.logprobs:
            message = pb.GenerateResponse(request_id=update.request_id)
            _fill_output(message, delta, delta.token_ids, None, text=delta.text, is_last=True)
            yield message
            continue
        for start in range(0, len(delta.logprobs), POSITIONS_PER_MESSAGE):
            end = start + POSITIONS_PER_MESSAGE
            message = pb.GenerateResponse(request_id=update.request_id)
            _fill_output(message, delta, delta.token_ids[start:end], delta.logprobs[start:end],
                         text=delta.text if start == 0 else "", is_last=end >= len(delta.logprobs))
            yield message


def _pieces(positions: list | None) -> Iterator[list]:
    for start in range(0, len(positions or ()), POSITIONS_PER_MESSAGE):
        yield positions[start:start + POSITIONS_PER_MESSAGE]


def _fill_output(message, delta: OutputDelta, token_ids, logprobs, *, text: str, is_last: bool) -> None:
    """`message` is a GenerateResponse or an Output: their output fields have the same names."""
    message.index = delta.index
    message.text = text
    message.token_ids.extend(token_ids)
    if logprobs:
        message.logprobs.extend(map(_position_to_proto, logprobs))
    if is_last and delta.finish_reason is not None:
        message.finish_reason = pb.FinishReason.Value(delta.finish_reason.name)
        if isinstance(delta.matched_stop, str):
            message.matched_stop_str = delta.matched_stop
        elif delta.matched_stop is not None:
            message.matched_token_id = delta.matched_stop
        if delta.cumulative_logprob is not None:
            message.cumulative_logprob = delta.cumulative_logprob


def _output_from_proto(message) -> OutputDelta:
    matched = message.WhichOneof("matched_stop")
    return OutputDelta(
        index=message.index,
        text=message.text,
        token_ids=list(message.token_ids),
        logprobs=_positions_from_proto(message.logprobs),
        finish_reason=_finish_reason(message.finish_reason),
        matched_stop=getattr(message, matched) if matched else None,
        cumulative_logprob=message.cumulative_logprob if message.HasField("cumulative_logprob") else None,
    )


def _finish_reason(value: int) -> FinishReason | None:
    return FinishReason[pb.FinishReason.Name(value)] if value else None


def _position_to_proto(position: PositionLogprobs | None) -> pb.PositionLogprobs:
    if position is None:
        return pb.PositionLogprobs()
    return pb.PositionLogprobs(chosen=_logprob_to_proto(position.chosen), top=map(_logprob_to_proto, position.top))


def _logprob_to_proto(entry: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob, rank=entry.rank, text=entry.text,
                           bytes=entry.bytes)


def _positions_from_proto(positions) -> list[PositionLogprobs | None] | None:
    return [
        PositionLogprobs(_logprob_from_proto(position.chosen), tuple(map(_logprob_from_proto, position.top)))
        if position.HasField("chosen") else None
        for position in positions
    ] or None


def _logprob_from_proto(entry: pb.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(entry.token_id, entry.logprob, entry.rank, entry.text, entry.bytes)


def _set_ending(message, update: GenerateUpdate) -> None:
    if update.usage is not None:
        for name in _USAGE_FIELDS:
            setattr(message.usage, name, getattr(update.usage, name))
    if update.metrics is not None:
        for name in _METRICS_FIELDS:
            if getattr(update.metrics, name) is not None:
                setattr(message.metrics, name, getattr(update.metrics, name))


def _ending(message) -> dict[str, Any]:
    usage = metrics = None
    if message.HasField("usage"):
        usage = Usage(*(getattr(message.usage, name) for name in _USAGE_FIELDS))
    if message.HasField("metrics"):
        metrics = RequestMetrics(**{name: getattr(message.metrics, name) if message.metrics.HasField(name) else None
                                    for name in _METRICS_FIELDS})
    return {"usage": usage, "metrics": metrics}
