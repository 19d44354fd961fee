"""/v1/chat/completions through the official client, over a scripted engine."""

import dataclasses
import json

import pytest

from jserve.request import Message
from tests.support.fake_engine import FakeEngine, whole_text
from tests.support.http_server import http_serving, post

MODEL = "fake-model"
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


async def test_a_chat_is_what_the_engine_says():
    engine = FakeEngine()
    async with http_serving(engine) as (_, client):
        answer = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "system", "content": "be brief"}, *HELLO], max_completion_tokens=3, n=2)
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert (choice.message.role, choice.message.content) == ("assistant", whole_text(3))
        assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 6
    [request] = engine.requests
    assert request.messages == [Message("system", "be brief"), Message("user", "hello")]
    assert request.sampling_params.max_tokens == 3 and request.tools is None


async def test_max_tokens_is_unset_unless_the_client_sets_it():
    engine = FakeEngine()
    async with http_serving(engine) as (_, client):
        await client.chat.completions.create(model=MODEL, messages=HELLO)
        await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2)
    assert [request.sampling_params.max_tokens for request in engine.requests] == [None, 2]


async def test_a_stream_begins_with_the_role_and_joins_to_the_text():
    async with http_serving(FakeEngine(step_s=0.002)) as (_, client):
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=5, n=2, stream=True, stream_options={"include_usage": True})
        *pieces, last = [piece async for piece in stream]
    for index in range(2):
        mine = [piece.choices[0] for piece in pieces if piece.choices[0].index == index]
        assert [choice.delta.role for choice in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert "".join(choice.delta.content for choice in mine) == whole_text(5)
        assert [choice.finish_reason for choice in mine] == [None] * (len(mine) - 1) + ["length"]
    assert last.choices == [] and last.usage.completion_tokens == 10


@pytest.mark.parametrize("top, k", [(None, 0), (0, 0), (2, 2)])
async def test_logprobs_carry_bytes_and_exactly_the_asked_alternatives(top, k):
    engine = FakeEngine()
    more = {} if top is None else {"top_logprobs": top}
    async with http_serving(engine) as (_, client):
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2, logprobs=True, **more)
    entries = answer.choices[0].logprobs.content
    assert engine.requests[0].sampling_params.logprobs == k
    assert [(entry.token, entry.logprob, entry.bytes) for entry in entries] == [("t0", -0.5, [255, 0])] * 2
    assert [len(entry.top_logprobs) for entry in entries] == [k, k]


async def test_tools_and_the_turns_of_a_tool_reach_the_template():
    engine = FakeEngine()
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "rain"}]}]
    async with http_serving(engine) as (_, client):
        await client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], tool_choice="auto")
        await client.chat.completions.create(model=MODEL, messages=HELLO, tools=[TOOL], tool_choice="none")
    first, second = engine.requests
    assert first.tools == [TOOL] and second.tools is None
    assert first.messages[1].tool_calls == [{**call, "function": {"name": "weather", "arguments": {"city": "Oslo"}}}]
    assert first.messages[2] == Message("tool", "rain", tool_call_id="1")


@pytest.mark.parametrize("response_format, expected", [
    ({"type": "text"}, {}),
    ({"type": "json_object"}, {"json_object": True}),
    ({"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"type": "object"}}},
     {"json_schema": {"type": "object"}}),
])
async def test_response_format_becomes_structured_output(response_format, expected):
    engine = FakeEngine()
    async with http_serving(engine) as (_, client):
        await client.chat.completions.create(model=MODEL, messages=HELLO, response_format=response_format)
    params = engine.requests[0].sampling_params
    schema = None if params.json_schema is None else json.loads(params.json_schema)
    assert (schema, params.json_object) == (expected.get("json_schema"), expected.get("json_object"))


async def test_what_asks_nothing_of_the_answer_is_taken():
    """Names for the client's own books, a hint for caches, and fields with the value that is the default."""
    labels = {"user": "me", "safety_identifier": "h", "prompt_cache_key": "k", "metadata": {"run": "7"}, "store": False,
              "prompt_cache_retention": "in_memory", "service_tier": "auto", "modalities": ["text"], "tools": [],
              "parallel_tool_calls": True}
    engine = FakeEngine()
    async with http_serving(engine) as (server, _):
        assert (await post(server, "/v1/chat/completions", {"messages": HELLO, **labels})).status == 200
        assert (await post(server, "/v1/chat/completions", {"messages": HELLO})).status == 200
    first, second = (dataclasses.replace(one, request_id=None) for one in engine.requests)
    assert first == second


REFUSED = [
    ({}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
     "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": HELLO, "json_object": False, "response_format": {"type": "json_object"}}, "json_object"),
    ({"messages": HELLO, "json_schema": "{}",
      "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
     "json_schema"),
    ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": HELLO, "logprobs": 2}, "logprobs"),
    ({"messages": HELLO, "tools": [{"name": "f"}]}, "tools[0]"),
    ({"messages": HELLO, "tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    ({"messages": HELLO, "parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"messages": HELLO, "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"messages": HELLO, "tools": {}}, "tools"),
    ({"messages": []}, "messages"),
    ({"messages": HELLO, "prediction": {}}, "prediction"),
    ({"messages": HELLO, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ({"messages": HELLO, "response_format": {"type": "xml"}}, "response_format.type"),
    ({"messages": HELLO, "response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"messages": HELLO, "reasoning_effort": "high"}, "reasoning_effort"),
    ({"messages": HELLO, "functions": []}, "functions"),
    ({"messages": HELLO, "modalities": ["audio"]}, "modalities"),
    ({"messages": HELLO, "echo": True}, "echo"),
]


async def test_what_a_chat_cannot_do_is_refused_by_name():
    engine = FakeEngine()
    async with http_serving(engine) as (server, _):
        answers = [await post(server, "/v1/chat/completions", body) for body, _ in REFUSED]
    assert [answer.error["param"] for answer in answers] == [param for _, param in REFUSED]
    assert {(answer.status, answer.error["type"]) for answer in answers} == {(400, "invalid_request_error")}
    assert all(answer.error["message"].startswith(answer.error["param"]) for answer in answers)
    assert engine.requests == []
