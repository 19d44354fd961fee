"""One result as the JSON object of `batch` and `generate --json`: API.md's names, absent keys left out.

Follows proto JSON where the protos have the same thing: enums by name, bytes as base64.
"""

from __future__ import annotations

import base64
import dataclasses

from jserve.request import PositionLogprobs, RequestError, TokenLogprob
from jserve.results import CompletionOutput, RequestOutput


def result_to_json(result: RequestOutput) -> dict[str, object]:
    return _without_none(
        request_id=result.request_id,
        outputs=[_output(output) for output in result.outputs],
        usage=_fields(result.usage),
        prompt_logprobs=_positions(result.prompt_logprobs),
        metrics=_fields(result.metrics),
    )


def error_to_json(error: RequestError, request_id: str | None) -> dict[str, object]:
    described = _without_none(code=error.code.value, field=error.field, message=error.message)
    return _without_none(request_id=request_id, error=described)


def _output(output: CompletionOutput) -> dict[str, object]:
    return _without_none(
        index=output.index,
        text=output.text,
        token_ids=output.token_ids,
        finish_reason=output.finish_reason.upper() if output.finish_reason else None,
        matched_stop=output.matched_stop,
        cumulative_logprob=output.cumulative_logprob,
        logprobs=_positions(output.logprobs),
    )


def _positions(positions: list[PositionLogprobs | None] | None) -> list[dict[str, object]] | None:
    if positions is None:
        return None
    return [{} if p is None else {"chosen": _entry(p.chosen), "top": [_entry(e) for e in p.top]} for p in positions]


def _entry(entry: TokenLogprob) -> dict[str, object]:
    return {**dataclasses.asdict(entry), "bytes": base64.b64encode(entry.bytes).decode()}


def _fields(value) -> dict[str, object] | None:
    return None if value is None else _without_none(**dataclasses.asdict(value))


def _without_none(**values: object) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}
