"""Embeddings: pooled hidden states equal those of the whole sequence in one step, in whatever chunks and company."""

from __future__ import annotations

import asyncio
import itertools
import random

import grpc
import numpy as np
import openai
import pytest

from jserve.proto_gen import inference_pb2 as pb
from jserve.proto_gen import inference_pb2_grpc
from jserve.request import GenerateRequest, Pooling, RequestError, SamplingParams
from jserve.weights.load import load_model
from tests.support.engines import request, run, running_engine
from tests.support.grpc_server import serving
from tests.support.http_server import openai_client
from tests.support.tiny_models import full_hidden, random_gguf

LONGEST = 160


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return random_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def engine(path):
    with running_engine(path, model={"served_name": "tiny"}) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(path):
    model = load_model(str(path), "float32")

    def embedding(prompt: list[int], pooling: Pooling) -> np.ndarray:
        padded = prompt + [0] * (LONGEST - len(prompt))  # causal: what follows changes nothing; one length compiles once
        hidden = full_hidden(model.params, model.config, padded)[: len(prompt)]
        return hidden.mean(0) if pooling is Pooling.MEAN else hidden[-1]

    return embedding


def embedding_request(prompt: list[int], pooling: Pooling) -> GenerateRequest:
    return GenerateRequest(prompt_token_ids=prompt, sampling_params=SamplingParams(max_tokens=0), pooling=pooling)


SETTINGS = {
    "chunks of 32": {},
    "preempted every third step": {},
    "chunks of 5": {"scheduler": {"max_num_batched_tokens": 5, "max_num_seqs": 4}},
    "moved to host memory": {"kv": {"preemption": "swap", "memory_bytes": 64 * 2**20, "block_size": 16}},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_embeddings_equal_those_of_the_whole_sequence(path, expected, settings):
    rng = random.Random(settings)
    prompts = [[rng.randrange(500) for _ in range(size)] for size in (1, 2, 31, 32, 33, 70, 100, 150)]
    prompts += [prompts[-1][:64] + [7], prompts[-1]]  # the cache may know their beginnings
    asked = [(prompt, pooling) for prompt in prompts for pooling in Pooling]
    with running_engine(path, **SETTINGS[settings]) as engine:
        if settings in ("preempted every third step", "moved to host memory"):
            preempt_often(engine)

        async def together():
            others = [engine.generate_all(request([3, i], 12, ignore_eos=True)) for i in range(3)]
            ours = [engine.generate_all(embedding_request(*one)) for one in asked]
            return (await asyncio.gather(*ours, *others))[: len(asked)]

        results = run(together())
        if settings == "moved to host memory":
            assert engine.loads().num_swap_preemptions > 0
    for (prompt, pooling), result in zip(asked, results):
        assert np.allclose(result.embedding, expected(prompt, pooling), rtol=1e-4, atol=1e-4), (len(prompt), pooling)
        assert result.usage.prompt_tokens == len(prompt) and result.usage.completion_tokens == 0
        assert pooling is Pooling.LAST or result.usage.cached_tokens == 0


def preempt_often(engine) -> None:
    """Preempts the last running sequence after every third step, whatever is in flight."""
    check, steps = engine._loop.on_step, itertools.count(1)

    def on_step(scheduler) -> None:
        if next(steps) % 3 == 0 and (running := scheduler.running()):
            scheduler._preempt(running[-1])
        check(scheduler)

    engine._loop.on_step = on_step


async def test_embed_over_grpc(engine, expected):
    text = "the rain in spain stays mainly in the plain"
    token_ids = engine.tokenizer.encode(text, add_special=True)
    async with serving(engine) as (_, client):
        embed = inference_pb2_grpc.InferenceStub(client._channel).Embed
        last = await embed(pb.EmbedRequest(prompt=text, request_id="mine"))
        mean = await embed(pb.EmbedRequest(prompt_token_ids=token_ids, pooling=pb.MEAN, normalize=True))
    assert last.request_id == "mine" and last.usage.prompt_tokens == len(token_ids)
    assert np.allclose(last.embedding, expected(token_ids, Pooling.LAST), rtol=1e-4, atol=1e-4)
    want = expected(token_ids, Pooling.MEAN)
    assert np.allclose(mean.embedding, want / np.linalg.norm(want), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("asked", "field"), [
    (dict(), "prompt"), (dict(prompt="x", prompt_token_ids=[1]), "prompt"), (dict(prompt_token_ids=[1, 512]), "[1]"),
    (dict(prompt_token_ids=range(257)), "prompt"), (dict(prompt="x", pooling=9), "pooling"),
    (dict(prompt="x", lora_name="x"), "lora_name"), (dict(prompt="x", request_id="a b"), "request_id"),
], ids=range(7))
async def test_what_cannot_be_embedded_is_refused_by_name(engine, asked, field):
    async with serving(engine) as (_, client):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inference_pb2_grpc.InferenceStub(client._channel).Embed(pb.EmbedRequest(**asked))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and field in caught.value.details()


def test_an_embedding_generates_nothing(engine):
    asking = GenerateRequest(prompt="x", sampling_params=SamplingParams(max_tokens=1), pooling=Pooling.LAST)
    with pytest.raises(RequestError, match="max_tokens must be 0"):
        run(engine.generate_all(asking))


async def test_embeddings_over_http(engine, expected):
    texts = [f"{number} little ducks" for number in range(40)]
    async with serving(engine, http_port=0) as (server, _), openai_client(server) as client:
        many = await client.embeddings.create(model="tiny", input=texts)  # the client asks for base64
        plain = await client.embeddings.create(
            model="tiny", input=[5, 6, 7], encoding_format="float", extra_body={"pooling": "mean", "normalize": False})
        for more, param in (
            ({"input": []}, "input"), ({"input": [[1], "x"]}, "input[1]"), ({"input": [[1], [999]]}, "input[1][0]"),
            ({"input": "x", "dimensions": 3}, "dimensions"), ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
            ({"input": "x", "extra_body": {"pooling": "max"}}, "pooling"), ({"input": "x" * 9000}, "input"),
            ({"input": "x", "extra_body": {"temperature": 1}}, "temperature"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.embeddings.create(model="tiny", **{"encoding_format": "float", **more})
            assert caught.value.param == param, caught.value.body
    assert [item.index for item in many.data] == list(range(40))
    for text, item in zip(texts, many.data):
        want = expected(engine.tokenizer.encode(text, add_special=True), Pooling.LAST)
        assert np.allclose(item.embedding, want / np.linalg.norm(want), rtol=1e-4, atol=1e-5)
    assert np.allclose(plain.data[0].embedding, expected([5, 6, 7], Pooling.MEAN), rtol=1e-4, atol=1e-4)
    assert plain.usage.prompt_tokens == plain.usage.total_tokens == 3
