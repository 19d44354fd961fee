"""HTTP over a real, tiny engine: the same answers as gRPC, cached tokens, tools, and what evaluation harnesses ask."""

import asyncio
import json
import math

import numpy as np
import openai
import pytest

from jserve.request import GenerateRequest, Message, SamplingParams
from jserve.server.async_client import AsyncClient
from jserve.weights.load import load_model
from tests.support.auth import BLUE, RED, auth_file
from tests.support.engines import running_engine
from tests.support.grpc_server import serving, until
from tests.support.http_server import openai_client, post
from tests.support.tiny_models import full_logits, random_gguf

TEXT = "the rain in spain stays mainly in the plain"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return random_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def engine(path):
    with running_engine(path, model={"served_name": "tiny"}) as engine:
        yield engine


@pytest.fixture(scope="module")
def model(path):
    return load_model(str(path), "float32")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


async def test_http_and_grpc_give_the_same_answers(engine):
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, stop=["qu"], logprobs=2, ignore_eos=True)
    sampling = {"temperature": 0.8, "seed": 3, "max_tokens": 12, "stop": "qu"}
    async with serving(engine, http_port=0) as (server, grpc), openai_client(server) as client:
        ours = await grpc.generate_unary(GenerateRequest(prompt=TEXT, sampling_params=params))
        theirs = await client.completions.create(
            model="tiny", prompt=TEXT, logprobs=2, **sampling, extra_body={"ignore_eos": True})
        [output], [choice] = ours.outputs, theirs.choices
        assert (choice.text, choice.finish_reason) == (output.text, output.finish_reason.value)
        assert choice.logprobs.token_logprobs == [entry.chosen.logprob for entry in output.logprobs]
        assert theirs.usage.completion_tokens == ours.usage.completion_tokens

        chat = [Message("system", "x"), Message("user", "<|im_end|>")]
        ours = await grpc.generate_unary(GenerateRequest(messages=chat, sampling_params=params))
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": turn.role, "content": turn.content} for turn in chat], **sampling,
            stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True})
        *pieces, last = [piece async for piece in stream]
        assert "".join(piece.choices[0].delta.content for piece in pieces) == ours.outputs[0].text
        assert last.usage.prompt_tokens == ours.usage.prompt_tokens


async def test_usage_tells_the_cached_tokens(engine):
    async with serving(engine, http_port=0) as (server, _), openai_client(server) as client:
        for cached in (0, 32):
            answer = await client.completions.create(model="tiny", prompt=list(range(300, 340)), max_tokens=1)
            assert answer.usage.prompt_tokens_details.cached_tokens == cached


async def test_no_tenant_finds_what_another_has_cached(engine, tmp_path):
    prompt = {"model": "tiny", "prompt": list(range(100, 140)), "max_tokens": 1, "cache_salt": "the same"}

    async def cached_tokens(token: str) -> int:
        answer = await post(server, "/v1/completions", prompt, headers={"Authorization": f"Bearer {token}"})
        return answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]

    async with serving(engine, http_port=0, auth_file=auth_file(tmp_path)) as (server, _):
        assert [await cached_tokens(token) for token in (RED, BLUE, RED, BLUE)] == [0, 0, 32, 32]


async def test_one_tenants_flood_leaves_another_within_twice_its_latency(engine, tmp_path):
    """In steps of the engine, which a busy machine does not stretch; without limits the flood is felt."""
    limits = "[tenant.red]\nmax_running = 2\n"

    async def steps_of_blue(with_flood: bool, limits: str) -> int:
        async with serving(engine, http_port=0, auth_file=auth_file(tmp_path, limits)) as (server, _):
            async with AsyncClient(server.address, token=RED) as red, AsyncClient(server.address, token=BLUE) as blue:
                request = GenerateRequest(prompt=TEXT, sampling_params=SamplingParams(max_tokens=20, ignore_eos=True))
                flood = [asyncio.create_task(red.generate_unary(request)) for _ in range(24 if with_flood else 0)]
                await until(lambda: len(server.state.calls) == len(flood))
                await until(lambda: not flood or engine.loads().num_running >= 2)
                before = engine.loads().num_steps
                await blue.generate_unary(request)
                after = engine.loads().num_steps
                await asyncio.gather(*flood)
        return after - before

    alone = await steps_of_blue(False, "")
    assert await steps_of_blue(True, limits) <= 2 * alone
    assert await steps_of_blue(True, "") > 2 * alone


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_an_evaluation_harness_gets_the_log_likelihood(engine, model, max_tokens):
    """As lm-eval's local-completions asks for it, and as it reads the answer (`[context:-1]` where max_tokens is 1)."""
    tokenizer = engine.tokenizer
    contexts, continuations = ["the cat ", "a dog sat on"], ["sat", " the mat"]
    prompts = [tokenizer.encode(context + more, add_special=False)
               for context, more in zip(contexts, continuations)]
    starts = [len(tokenizer.encode(context, add_special=False)) for context in contexts]
    async with serving(engine, http_port=0) as (server, _):
        answer = await post(server, "/v1/completions", {
            "model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": max_tokens, "logprobs": 1,
            "seed": 1234, "echo": True})
    for prompt, start, choice in zip(prompts, starts, answer.json["choices"]):
        logprobs = choice["logprobs"]
        end = len(prompt)
        assert len(logprobs["token_logprobs"]) == end + max_tokens
        padded = prompt + [0] * (24 - end)  # causal: what follows changes nothing; one length compiles once
        want = log_softmax(full_logits(model.params, model.config, padded))
        expected = [want[at - 1, prompt[at]] for at in range(start, end)]
        assert np.allclose(logprobs["token_logprobs"][start:end], expected, atol=1e-4)
        is_greedy = all(token == max(top, key=top.get)
                        for token, top in zip(logprobs["tokens"][start:end], logprobs["top_logprobs"][start:end]))
        assert is_greedy == all(want[at - 1].argmax() == prompt[at] for at in range(start, end))
        text = tokenizer.decode(prompt)
        assert choice["text"].startswith(text)
        assert logprobs["text_offset"][:end] == [len(tokenizer.decode(prompt[:at])) for at in range(end)]
        assert choice["finish_reason"] in ("length", "stop")
    assert answer.json["usage"]["completion_tokens"] == 2 * max_tokens


async def test_n_samples_differ_and_are_those_of_grpc(engine):
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=6, n=3, ignore_eos=True)
    async with serving(engine, http_port=0) as (server, grpc), openai_client(server) as client:
        ours = await grpc.generate_unary(GenerateRequest(prompt=TEXT, sampling_params=params))
        stream = await client.completions.create(
            model="tiny", prompt=TEXT, n=3, temperature=1.0, seed=5, max_tokens=6, stream=True,
            extra_body={"ignore_eos": True})
        texts = dict.fromkeys(range(3), "")
        async for piece in stream:
            texts[piece.choices[0].index] += piece.choices[0].text
    assert texts == {output.index: output.text for output in ours.outputs}
    assert len(set(texts.values())) == 3


async def test_no_tokens_asked_for_is_the_prompt_alone(engine):
    async with serving(engine, http_port=0) as (server, _), openai_client(server) as client:
        answer = await client.completions.create(model="tiny", prompt=TEXT, max_tokens=0)
        echoed = await client.completions.create(model="tiny", prompt=TEXT, max_tokens=0, echo=True)
    assert (answer.choices[0].text, echoed.choices[0].text) == ("", TEXT)
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 0


async def test_a_harness_generates_until_a_stop(engine):
    async with serving(engine, http_port=0) as (server, _):
        body = {"model": "tiny", "prompt": [engine.tokenizer.encode(TEXT, add_special=False)], "max_tokens": 20,
                "temperature": 0, "seed": 1234, "ignore_eos": True}
        whole = (await post(server, "/v1/completions", body)).json["choices"][0]["text"]
        stop = whole[4:6]
        cut = (await post(server, "/v1/completions", {**body, "stop": [stop, "<|im_end|>"]})).json["choices"][0]
    assert (cut["text"], cut["finish_reason"], cut["stop_reason"]) == (whole[: whole.index(stop)], "stop", stop)


async def test_what_the_validator_refuses_names_openai_fields(engine):
    async with serving(engine, http_port=0) as (server, _), openai_client(server) as client:
        for more, param in (({"top_p": 1.5}, "top_p"), ({"temperature": "hot"}, "temperature"), ({"stop": 3}, "stop"),
                            ({"logprobs": 99}, "logprobs"), ({"max_tokens": 1.5}, "max_tokens"),
                            ({"extra_body": {"length_penalty": "x"}}, "length_penalty"),
                            ({"prompt": [1, 99999]}, "prompt[1]"), ({"prompt": [[]]}, "prompt"),
                            ({"prompt": "x" * 9000}, "prompt"), ({"prompt": [[1], [2, 99999]]}, "prompt[1][1]"),
                            ({"prompt": ["a", ""]}, "prompt[1]"), ({"prompt": ["a", "b"], "top_p": 9}, "top_p")):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(**{"model": "tiny", "prompt": "p", **more})
            message = caught.value.body["message"]
            assert caught.value.param == param and message.startswith(param), message


async def test_tools_reach_the_model_through_its_template(engine):
    tool = {"type": "function", "function": {"name": "rain", "parameters": {"type": "object", "properties": {}}}}
    turns = [{"role": "user", "content": "x"}]
    ask = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    shown = engine.tokenizer.encode_chat(turns, tools=[tool])
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    async with serving(engine, http_port=0) as (server, grpc), openai_client(server) as client:
        answer = await client.chat.completions.create(model="tiny", messages=turns, tools=[tool], **ask)
        without = await client.chat.completions.create(model="tiny", messages=turns, **ask)
        counted = await post(server, "/tokenize", {"messages": turns, "tools": [tool]})
        ours = await grpc.generate_unary(GenerateRequest(prompt_token_ids=shown, sampling_params=params))
    assert '"rain"' in engine.tokenizer.decode(shown, skip_special_tokens=False)
    assert counted.json["tokens"] == shown and answer.usage.prompt_tokens == len(shown) > without.usage.prompt_tokens
    assert answer.choices[0].message.content == ours.outputs[0].text != without.choices[0].message.content


@pytest.mark.parametrize("temperature", [0, 1.5])
async def test_response_format_holds(engine, temperature):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}},
              "required": ["ok", "n"], "additionalProperties": False}
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": temperature, "seed": 1,
           "max_tokens": 100}
    async with serving(engine, http_port=0) as (server, _), openai_client(server) as client:
        answer = await client.chat.completions.create(
            **ask, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
        [choice] = answer.choices
        document = json.loads(choice.message.content)
        assert isinstance(document["ok"], bool) and document["n"] in (1, 2) and len(document) == 2
        assert choice.finish_reason == "stop"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**ask, response_format={
                "type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}})
        assert caught.value.param == "response_format.json_schema.schema"


@pytest.mark.parametrize("mask", [{"top_k": 1}, {"allowed_token_ids": [5, 6]}, {"choice": ["ab", "cd"]}], ids=str)
async def test_logprobs_beside_a_mask_are_numbers(engine, mask):
    """What is masked has its raw log-probability; strict JSON knows no Infinity and no NaN."""
    body = {"prompt": TEXT, "max_tokens": 4, "temperature": 1, "seed": 1, "logprobs": 5, "prompt_logprobs": 5, **mask}
    async with serving(engine, http_port=0) as (server, _):
        answer = await post(server, "/v1/completions", body)
    assert answer.status == 200 and not any(word in answer.body for word in (b"Infinity", b"NaN"))
    [choice] = answer.json["choices"]
    for sampled, top in zip(choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]):
        assert 5 <= len(top) <= 6 and all(-9999 <= value <= 1e-6 for value in (sampled, *top.values()))
    for position in choice["prompt_logprobs"][1:]:
        assert all(-9999 <= entry["logprob"] <= 1e-6 for entry in position.values())


async def test_probabilities_of_chat_sum_to_less_than_one(engine):
    async with serving(engine, http_port=0) as (server, _), openai_client(server) as client:
        answer = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=3, logprobs=True, top_logprobs=5)
    for entry in answer.choices[0].logprobs.content:
        assert 0 < sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1 + 1e-5
        assert len(entry.top_logprobs) == 5
