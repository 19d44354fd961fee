"""/v1/completions through the official client, over a scripted engine."""

import pytest

from tests.support.fake_engine import FakeEngine, whole_text
from tests.support.http_server import events, http_serving, post

MODEL = "fake-model"
BOS_TEXT = "<s>"


async def test_a_completion_is_what_the_engine_says():
    engine = FakeEngine()
    async with http_serving(engine) as (_, client):
        answer = await client.completions.create(
            model=MODEL, prompt="hello", max_tokens=3, temperature=0.5, top_p=0.9, seed=7, stop=["x", "y"],
            logit_bias={"5": 1.5}, presence_penalty=0.1, frequency_penalty=0.2, user="somebody",
            extra_body={"top_k": 4, "min_p": 0.1, "stop_token_ids": [9], "priority": 2, "cache_salt": "s",
                        "bypass_prefix_cache": True, "early_stopping": "never"})
    assert (answer.object, answer.model, answer.id.startswith("cmpl-")) == ("text_completion", MODEL, True)
    [choice] = answer.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, whole_text(3), "length", None)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 3, 8)
    assert usage.prompt_tokens_details.cached_tokens == 0
    [request] = engine.requests
    params = request.sampling_params
    assert (request.prompt, request.priority, request.cache_salt) == ("hello", 2, "s")
    assert request.bypass_prefix_cache is True
    assert (params.temperature, params.top_p, params.seed, params.stop) == (0.5, 0.9, 7, ["x", "y"])
    assert (params.logit_bias, params.presence_penalty, params.frequency_penalty) == ({5: 1.5}, 0.1, 0.2)
    assert (params.top_k, params.min_p, params.stop_token_ids) == (4, 0.1, [9])
    assert params.early_stopping.name == "NEVER"
    assert request.request_id == answer.id and request.tenant is None


async def test_unset_and_null_are_the_same_and_max_tokens_is_16():
    engine = FakeEngine()
    async with http_serving(engine) as (server, _):
        assert (await post(server, "/v1/completions", {"prompt": "p"})).status == 200
        assert (await post(server, "/v1/completions", {"prompt": "p", "max_tokens": None, "temperature": None,
                                                       "suffix": "", "stream_options": None})).status == 200
    assert [request.sampling_params.max_tokens for request in engine.requests] == [16, 16]
    assert {request.sampling_params.temperature for request in engine.requests} == {None}


@pytest.mark.parametrize("prompt, received", [
    ("text", [("text", None)]),
    (["a", "bc"], [("a", None), ("bc", None)]),
    ([5, 6, 7], [(None, [5, 6, 7])]),
    ([[5, 6], [7]], [(None, [5, 6]), (None, [7])]),
])
async def test_all_four_forms_of_a_prompt(prompt, received):
    engine = FakeEngine()
    async with http_serving(engine) as (_, client):
        answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=2, n=2)
    assert sorted((request.prompt, request.prompt_token_ids) for request in engine.requests) == sorted(received)
    assert [choice.index for choice in answer.choices] == list(range(2 * len(received)))
    assert {choice.text for choice in answer.choices} == {whole_text(2)}
    assert answer.usage.completion_tokens == 4 * len(received)
    assert len({request.request_id for request in engine.requests}) == len(received)


async def test_a_stream_joins_to_the_same_text_and_ends_with_usage():
    async with http_serving(FakeEngine(step_s=0.002)) as (_, client):
        stream = await client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=6, n=2, stream=True,
                                                 stream_options={"include_usage": True})
        pieces = [piece async for piece in stream]
    *pieces, last = pieces
    texts, reasons = dict.fromkeys(range(4), ""), {}
    for piece in pieces:
        assert piece.usage is None
        [choice] = piece.choices
        texts[choice.index] += choice.text
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert texts == dict.fromkeys(range(4), whole_text(6))
    assert reasons == dict.fromkeys(range(4), "length")
    assert last.choices == [] and (last.usage.completion_tokens, last.usage.prompt_tokens) == (24, 2)
    assert len({piece.id for piece in (*pieces, last)}) == 1


async def test_without_include_usage_no_event_speaks_of_usage_and_the_last_is_done():
    async with http_serving(FakeEngine()) as (server, _):
        answer = await post(server, "/v1/completions", {"prompt": "p", "max_tokens": 3, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *pieces, done = events(answer)
    assert done == "[DONE]" and pieces and not any("usage" in piece for piece in pieces)


async def test_logprobs_are_lists_side_by_side():
    async with http_serving(FakeEngine()) as (_, client):
        answer = await client.completions.create(model=MODEL, prompt="p", max_tokens=3, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["bytes:\\xff\\x00"] * 3, "bytes that are no character are spelled out"
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.top_logprobs == [{"bytes:\\xff\\x00": -0.5, "bytes:\\xff\\x01": -1.0}] * 3
    assert logprobs.text_offset == [0, 2, 4]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt, echoed, num_tokens", [("abcd", "abcd", 5), ([97, 98, 99], "abc", 3)])
async def test_echo_with_logprobs_scores_the_prompt_too(prompt, echoed, num_tokens, stream):
    engine = FakeEngine()
    async with http_serving(engine) as (server, _):
        body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 2, "temperature": 0, "stream": stream}
        answer = await post(server, "/v1/completions", body)
    assert [request.sampling_params.prompt_logprobs for request in engine.requests] == [1]
    choices = [piece["choices"][0] for piece in (events(answer)[:-1] if stream else [answer.json])]
    assert "".join(choice["text"] for choice in choices) == echoed + whole_text(2)
    joined = {name: sum((choice["logprobs"][name] for choice in choices), [])
              for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    assert {len(values) for values in joined.values()} == {num_tokens + 2}
    assert joined["token_logprobs"][0] is joined["top_logprobs"][0] is None
    assert joined["tokens"][0] == (BOS_TEXT if isinstance(prompt, str) else "a")
    assert None not in joined["token_logprobs"][1:]


async def test_echo_alone_needs_no_scores():
    engine = FakeEngine()
    async with http_serving(engine) as (_, client):
        text = await client.completions.create(model=MODEL, prompt="abc", echo=True, max_tokens=1)
        ids = await client.completions.create(model=MODEL, prompt=[256, 100], echo=True, max_tokens=1, n=2)
    assert text.choices[0].text == "abc" + whole_text(1)
    assert [choice.text for choice in ids.choices] == ["d" + whole_text(1)] * 2
    assert {request.sampling_params.prompt_logprobs for request in engine.requests} == {None}


async def test_prompt_logprobs_of_their_own_are_shown_as_vllm_does():
    async with http_serving(FakeEngine()) as (server, _):
        answer = await post(server, "/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 1, "prompt_logprobs": 1})
    first, *rest = answer.json["choices"][0]["prompt_logprobs"]
    assert first is None and len(rest) == 2
    assert rest[0] == {"11": {"logprob": -0.5, "rank": 1, "decoded_token": "t0"}}


async def test_token_ids_are_told_where_asked():
    body = {"model": MODEL, "prompt": [5, 6], "max_tokens": 3, "return_token_ids": True}
    async with http_serving(FakeEngine()) as (server, _):
        [choice] = (await post(server, "/v1/completions", body)).json["choices"]
        pieces = events(await post(server, "/v1/completions", {**body, "stream": True}))
        [plain] = (await post(server, "/v1/completions", {**body, "return_token_ids": False})).json["choices"]
    assert choice["token_ids"] == [10, 11, 12] and "token_ids" not in plain
    assert [token_id for piece in pieces[:-1] for one in piece["choices"] for token_id in one["token_ids"]] == [10, 11, 12]
