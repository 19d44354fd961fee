"""A line for each request that ended: its id, counts and times; never its text."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from contextlib import aclosing

import pytest

from jserve.cli import logs
from jserve.request import GenerateRequest, RequestError, SamplingParams
from tests.support.stand_in import stand_in_engine


@pytest.fixture
def lines():
    """The log as JSON objects."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.JsonFormatter())
    logger = logging.getLogger("jserve.requests")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logger.removeHandler(handler)
    logger.setLevel(before)


def request(name, max_tokens=3, **params):
    return GenerateRequest(
        prompt_token_ids=[9, 8, 7], request_id=name, sampling_params=SamplingParams(max_tokens=max_tokens, **params)
    )


async def test_each_request_that_ended_has_one_line(lines):
    with stand_in_engine() as engine:
        await engine.generate_all(request("whole"))
        with pytest.raises(RequestError):
            await engine.generate_all(request("wrong", temperature=-1.0))
        async with aclosing(engine.generate(request("left", 500))) as updates:
            await anext(updates)
        running = asyncio.ensure_future(engine.generate_all(request("ended", 500)))
        while not await engine.abort("ended"):
            await asyncio.sleep(0.001)
        await running
    events = {line["request_id"]: line for line in lines()}
    assert [line["event"] for line in lines()] == ["finished", "refused", "cancelled", "finished"]
    whole = events["whole"]
    assert (whole["prompt_tokens"], whole["completion_tokens"], whole["finish_reason"]) == (3, 3, "length")
    assert 0 <= whole["queue_s"] <= whole["ttft_s"] <= whole["e2e_s"] <= whole["seconds"] + 0.01
    assert events["wrong"]["code"] == "INVALID_ARGUMENT" and "temperature" in events["wrong"]["field"]
    assert events["ended"]["finish_reason"] == "aborted"
    assert all(line["level"] == "INFO" and line["time"].endswith("Z") for line in lines())


async def test_nothing_is_written_unless_asked(lines):
    logging.getLogger("jserve.requests").setLevel(logging.WARNING)
    with stand_in_engine() as engine:
        await engine.generate_all(request("whole"))
    assert lines() == []


def test_lines_for_people_have_the_fields_behind_the_message():
    record = logging.LogRecord("jserve.requests", logging.INFO, "f", 1, "request %s", ("finished",), None)
    record.fields = {"event": "finished", "request_id": "r1", "completion_tokens": 3}
    assert logs.TextFormatter().format(record).endswith(
        "INFO jserve.requests: request finished request_id=r1 completion_tokens=3"
    )
    try:
        raise ValueError("boom")
    except ValueError as error:
        broken = logging.LogRecord("jserve.engine", logging.ERROR, "f", 1, "a step failed", (), (
            type(error), error, error.__traceback__))
    line = json.loads(logs.JsonFormatter().format(broken))
    assert line["level"] == "ERROR" and "ValueError: boom" in line["traceback"]
