"""One structured line for every request that ended, whichever front end brought it: ids, counts and times, no text."""

from __future__ import annotations

import logging

from jserve.request import GenerateUpdate, RequestError

log = logging.getLogger("jserve.requests")

FIELDS = "fields"
"""Attribute of a log record that holds its structured part; `jserve.cli.logs` writes it."""


def ended(request_id: str, last: GenerateUpdate | None, seconds: float, failure: RequestError | None) -> None:
    """`last` is the latest update: without usage, and with no failure, the client left before the end."""
    if not log.isEnabledFor(logging.INFO):
        return
    fields: dict[str, object] = {"request_id": request_id, "seconds": round(seconds, 6)}
    if failure is not None:
        _write("failed", {**fields, "code": failure.code.value})
        return
    if last is None or last.usage is None:
        _write("cancelled", fields)
        return
    reasons = [output.finish_reason.value for output in last.outputs if output.finish_reason is not None]
    fields |= {
        "finish_reason": reasons[-1] if reasons else None,
        "prompt_tokens": last.usage.prompt_tokens,
        "completion_tokens": last.usage.completion_tokens,
        "cached_tokens": last.usage.cached_tokens,
    }
    if last.metrics is not None:
        times = last.metrics
        fields |= {
            "queue_s": _rounded(times.queue_s),
            "ttft_s": _rounded(times.first_token and times.first_token - times.arrival),
            "e2e_s": _rounded(times.last_token and times.last_token - times.arrival),
            "num_preemptions": times.num_preemptions,
        }
    _write("finished", fields)


def refused(request_id: str | None, error: RequestError) -> None:
    if log.isEnabledFor(logging.INFO):
        fields = {"request_id": request_id, "code": error.code.value, "field": error.field}
        _write("refused", fields)


def _write(event: str, fields: dict[str, object]) -> None:
    told = {name: value for name, value in fields.items() if value is not None}
    log.info("request %s", event, extra={FIELDS: {"event": event, **told}})


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
