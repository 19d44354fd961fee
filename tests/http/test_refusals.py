"""Errors in OpenAI's form, with the status that the official client turns into the right exception."""

import openai
import pytest

from jserve.request import Code, RequestError, invalid
from tests.support.fake_engine import FakeEngine
from tests.support.http_server import ask, events, http_serving, post

MODEL = "fake-model"


@pytest.mark.parametrize("error, exception, status, kind", [
    (invalid("sampling_params.top_p", 2, "must be in (0, 1]"), openai.BadRequestError, 400, "invalid_request_error"),
    (RequestError(Code.RESOURCE_EXHAUSTED, "full", retry_after_s=2.2), openai.RateLimitError, 429, "rate_limit_error"),
    (RequestError(Code.UNAVAILABLE, "later", retry_after_s=1.0), openai.InternalServerError, 503, "server_error"),
    (RequestError(Code.ALREADY_EXISTS, "twice", field="request_id"), openai.ConflictError, 409,
     "invalid_request_error"),
    (RequestError(Code.PERMISSION_DENIED, "no"), openai.PermissionDeniedError, 403, "permission_error"),
    (RequestError(Code.INTERNAL, "oh"), openai.InternalServerError, 500, "server_error"),
    (RuntimeError("secret detail"), openai.InternalServerError, 500, "server_error"),
])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_refuses_has_the_right_status(error, exception, status, kind, stream):
    engine = FakeEngine()
    engine.failures["p"] = (0, error)
    async with http_serving(engine) as (_, client):
        with pytest.raises(exception) as caught:
            await client.completions.create(model=MODEL, prompt="p", stream=stream)
    answer = caught.value
    assert (answer.status_code, answer.type) == (status, kind)
    assert "secret detail" not in str(answer)
    if status == 400:
        assert answer.param == "top_p" and answer.body["message"] == "top_p = 2: must be in (0, 1]"
    retry_after = {429: "3", 503: "1"}.get(status)
    assert answer.response.headers.get("retry-after") == retry_after


async def test_an_error_after_the_first_piece_is_the_last_event():
    engine = FakeEngine(step_s=0.01)
    engine.failures["p"] = (2, RequestError(Code.INTERNAL, "the device failed"))
    async with http_serving(engine) as (server, client):
        answer = await post(server, "/v1/completions", {"prompt": "p", "stream": True})
        *pieces, last = events(answer)
        assert answer.status == 200 and pieces
        assert last["error"]["message"] == "the device failed" and last["error"]["code"] == "internal"
        with pytest.raises(openai.APIError, match="the device failed"):
            async for _ in await client.completions.create(model=MODEL, prompt="p", stream=True):
                pass


REFUSED = [
    ({}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["a", [1]]}, "prompt[1]"),
    ({"prompt": ["x"] * 1025}, "prompt"),
    ({"prompt": "p", "suffix": "s"}, "suffix"),
    ({"prompt": "p", "temperatur": 1}, "temperatur"),
    ({"prompt": "p", "model": 3}, "model"),
    ({"prompt": "p", "stream": 1}, "stream"),
    ({"prompt": "p", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "p", "stream": True, "stream_options": {"every": 1}}, "stream_options.every"),
    ({"prompt": "p", "logit_bias": [1]}, "logit_bias"),
    ({"prompt": "p", "logit_bias": {"a": 1}}, "logit_bias"),
    ({"prompt": "p", "logit_bias": {"1": 1, "01": 2}}, "logit_bias"),
    ({"prompt": "p", "echo": "yes"}, "echo"),
    ({"prompt": "p", "echo": True, "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
    ({"prompt": "p", "echo": True, "logprobs": 1, "prompt_logprobs": 2}, "prompt_logprobs"),
    ({"prompt": "p", "store": True}, "store"),
    ({"prompt": "p", "messages": []}, "messages"),
    ({"prompt": "p", "priority": True}, "priority"),
    ({"prompt": "p", "store": 0}, "store"),
    ({"prompt": "p", "metadata": {"a": 1}}, "metadata.a"),
    ({"prompt": "p", "metadata": []}, "metadata"),
    ({"prompt": "p", "prompt_cache_key": 5}, "prompt_cache_key"),
    ({"prompt": "p", "prompt_cache_retention": "24h"}, "prompt_cache_retention"),
    ({"prompt": "p", "service_tier": "flex"}, "service_tier"),
    ({"prompt": "p", "response_format": {}}, "response_format.type"),
    ({"prompt": "p", "response_format": []}, "response_format"),
]


async def test_what_a_completion_cannot_do_is_refused_by_name():
    engine = FakeEngine()
    async with http_serving(engine) as (server, _):
        answers = [await post(server, "/v1/completions", body) for body, _ in REFUSED]
    assert [answer.error["param"] for answer in answers] == [param for _, param in REFUSED]
    assert {(answer.status, answer.error["type"]) for answer in answers} == {(400, "invalid_request_error")}
    assert all(answer.error["message"].startswith(answer.error["param"]) for answer in answers)
    assert engine.requests == []


async def test_a_misspelled_field_is_answered_with_the_nearest():
    async with http_serving(FakeEngine()) as (server, _):
        answer = await post(server, "/v1/completions", {"prompt": "p", "temperatur": 1})
    assert answer.error["message"] == (
        "temperatur = 1: is not a field that this server supports; did you mean temperature?")


@pytest.mark.parametrize("body, headers, status, message", [
    (b"{", {}, 400, "the body is not valid JSON"),
    (b"[1]", {}, 400, "the body must be a JSON object, not list"),
    (b'{"prompt": "a", "prompt": "b"}', {}, 400, "the key 'prompt' is there twice"),
    (b"[" * 100_000, {}, 400, "the body is not valid JSON"),
    (b'{"prompt": "\xff"}', {}, 400, "the body is not valid JSON"),
    (b"{}", {"Content-Type": "text/plain"}, 415, "application/json"),
    (b" " * 200_001, {}, 413, "larger than 200000 bytes"),
])
async def test_a_body_that_cannot_be_read(body, headers, status, message):
    async with http_serving(FakeEngine(), max_message_bytes=200_000) as (server, _):
        answer = await ask(server, "POST", "/v1/completions", body, headers=headers)
    assert answer.status == status and message in answer.error["message"]


async def test_lone_surrogates_and_odd_numbers_are_refused_not_crashed_on():
    async with http_serving(FakeEngine()) as (server, _):
        answer = await ask(server, "POST", "/v1/completions", b'{"model": "\\ud800", "prompt": "p"}')
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        answer = await ask(server, "POST", "/v1/completions", b'{"prompt": "p", "x": NaN}')
        assert (answer.status, answer.error["param"]) == (400, "x")
        answer = await ask(server, "POST", "/v1/completions", b'{"prompt": "p", "seed": ' + b"9" * 5000 + b"}")
        assert answer.status == 400


async def test_another_model_is_not_found():
    async with http_serving(FakeEngine()) as (_, client):
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "x"}])
        assert caught.value.code == "model_not_found" and "'fake-model'" in caught.value.body["message"]
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt-9")


async def test_unknown_paths_and_methods_have_the_same_form():
    async with http_serving(FakeEngine()) as (server, _):
        assert (await ask(server, "GET", "/v2")).error["message"] == "GET /v2: Not Found"
        wrong = await ask(server, "GET", "/v1/completions")
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")


async def test_refusals_name_the_parameter_as_the_client_called_it():
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 5,
             "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"foo": 1}}}}
    answers = {}
    for name in ("json_schema", "max_tokens", "top_p"):
        engine = FakeEngine()
        engine.failures[None] = (0, invalid(f"sampling_params.{name}", "x", "is wrong"))  # None: a chat has no prompt
        async with http_serving(engine) as (server, _):
            answers[name] = await post(server, "/v1/chat/completions", asked)
    called = {"json_schema": "response_format.json_schema.schema", "max_tokens": "max_completion_tokens", "top_p": "top_p"}
    assert {name: answer.error["param"] for name, answer in answers.items()} == called
    assert answers["json_schema"].error["message"] == "response_format.json_schema.schema = 'x': is wrong"


async def test_half_a_surrogate_pair_is_refused_by_place():
    engine = FakeEngine()
    async with http_serving(engine) as (server, _):
        answer = await post(server, "/tokenize", {"prompt": "a\ud800"})
        chat = await post(server, "/tokenize", {"messages": [{"role": "user", "content": "\udc00"}]})
    assert (answer.status, answer.error["param"]) == (400, "prompt") and "character 1" in answer.error["message"]
    assert (chat.status, chat.error["param"]) == (400, "messages[0].content")
