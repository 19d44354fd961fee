"""Generate and GenerateUnary over real sockets."""

import asyncio

import pytest

from jserve.proto_gen import inference_pb2, inference_pb2_grpc
from jserve.request import (
    Code,
    FinishReason,
    GenerateRequest,
    GenerateUpdate,
    Message,
    RequestError,
    SamplingParams,
)
from jserve.server.client import Client
from tests.support.fake_engine import FakeEngine, token_id, whole_text
from tests.support.grpc_server import serving, until


def ask(num_tokens: int | None = None, **fields) -> GenerateRequest:
    return GenerateRequest(prompt="hi", sampling_params=SamplingParams(max_tokens=num_tokens, **fields))


async def collect(stream) -> list[GenerateUpdate]:
    return [update async for update in stream]


def joined(updates: list[GenerateUpdate], index: int = 0) -> tuple[str, list[int]]:
    deltas = [delta for update in updates for delta in update.outputs if delta.index == index]
    return "".join(delta.text for delta in deltas), [token for delta in deltas for token in delta.token_ids]


async def test_a_stream_brings_each_token_and_one_ending():
    async with serving(FakeEngine(step_s=0.01)) as (_, client):
        updates = await collect(client.generate(ask(5)))
    assert len(updates) == 5, "a fast reader gets a message a token"
    assert joined(updates) == (whole_text(5), [token_id(i) for i in range(5)])
    assert [update.usage is not None for update in updates] == [False] * 4 + [True]
    assert [update.outputs[0].finish_reason for update in updates] == [None] * 4 + [FinishReason.LENGTH]
    assert updates[-1].usage.completion_tokens == 5
    assert updates[-1].metrics.arrival <= updates[-1].metrics.last_token


async def test_unary_gives_what_the_stream_gives():
    request = ask(7, n=3, logprobs=2, prompt_logprobs=1)
    async with serving(FakeEngine()) as (_, client):
        updates = await collect(client.generate(request))
        whole = await client.generate_unary(request)
    assert [output.index for output in whole.outputs] == [0, 1, 2]
    for output in whole.outputs:
        assert (output.text, output.token_ids) == joined(updates, output.index)
        streamed = [delta for update in updates for delta in update.outputs if delta.index == output.index]
        assert output.logprobs == [entry for delta in streamed for entry in delta.logprobs]
        assert output.cumulative_logprob == streamed[-1].cumulative_logprob
    assert whole.prompt_logprobs == updates[0].prompt_logprobs and whole.prompt_logprobs[0] is None
    assert whole.usage == updates[-1].usage


async def test_the_engine_gets_what_the_client_asked_for():
    engine = FakeEngine()
    params = SamplingParams(max_tokens=2, stop=["x"], logit_bias={3: 1.5}, seed=-(2**63))
    sent = GenerateRequest(messages=[Message("user", "hi")], sampling_params=params, request_id="mine", priority=-2)
    async with serving(engine) as (_, client):
        await client.generate_unary(sent)
    assert engine.requests == [sent]


async def test_a_request_without_id_gets_one_that_every_message_carries():
    engine = FakeEngine()
    async with serving(engine) as (_, client):
        updates = await collect(client.generate(ask(3)))
        other = await client.generate_unary(ask(3))
    [request_id] = {update.request_id for update in updates}
    assert request_id == engine.requests[0].request_id and request_id != other.request_id


async def test_stream_interval_makes_larger_messages():
    async with serving(FakeEngine(step_s=0.002)) as (_, client):
        updates = await collect(client.generate(ask(11), stream_interval=4))
    assert [len(update.outputs[0].token_ids) for update in updates] == [1, 4, 4, 2]
    assert joined(updates)[0] == whole_text(11)


async def test_stream_options_are_refused_where_nothing_streams():
    async with serving(FakeEngine()) as (server, client):
        stub = inference_pb2_grpc.InferenceStub(client._channel)
        with pytest.raises(Exception, match="stream: has no meaning in GenerateUnary"):
            await stub.GenerateUnary(inference_pb2.GenerateRequest(prompt="p", stream={"interval": 1}))
        assert await client.generate_unary(ask(1))


async def test_abort_ends_the_stream_with_aborted():
    engine = FakeEngine(step_s=0.01)
    async with serving(engine) as (_, client):
        stream = client.generate(GenerateRequest(prompt="hi", request_id="long",
                                                 sampling_params=SamplingParams(max_tokens=10_000)))
        first = await anext(stream)
        assert await client.abort("long") is True
        rest = await collect(stream)
        assert await client.abort("long") is False
        assert await client.abort("never") is False
    assert rest[-1].outputs[0].finish_reason is FinishReason.ABORTED
    assert rest[-1].usage.completion_tokens == len(joined([first, *rest])[1])


async def test_an_id_that_is_running_is_refused():
    engine = FakeEngine()
    engine.go.clear()
    async with serving(engine) as (_, client):
        request = GenerateRequest(prompt="hi", request_id="twin")
        first = asyncio.create_task(client.generate_unary(request))
        await until(lambda: engine.running)
        with pytest.raises(RequestError) as caught:
            await client.generate_unary(request)
        assert (caught.value.code, caught.value.field) == (Code.ALREADY_EXISTS, "request_id")
        engine.go.set()
        assert (await first).usage.completion_tokens == 5


async def test_the_blocking_client_does_the_same():
    engine = FakeEngine(step_s=0.005)

    def blocking(address: str) -> None:
        with Client(address) as client:
            client.wait_until_ready(5)
            updates = list(client.generate(ask(4)))
            assert joined(updates)[0] == whole_text(4) == client.generate_unary(ask(4)).outputs[0].text
            assert client.detokenize(client.tokenize("hé", add_special_tokens=False)) == "hé"
            assert client.tokenize([Message("user", "x")]) == list(b"<user>x<assistant>")
            assert client.model_info().name == "fake-model"
            assert client.server_info().state == "ready"
            assert client.loads().num_open_streams == 0
            assert client.flush_cache() == 7 and client.check_integrity() == []
            assert client.abort("none") is False and client.is_serving()
            stream = client.generate(ask(10_000))
            next(stream)
            stream.close()
            with pytest.raises(RequestError, match="is too hot"):
                client.generate_unary(GenerateRequest(prompt="hot"))

    engine.failures["hot"] = (0, RequestError(Code.INVALID_ARGUMENT, "it is too hot", field="prompt"))
    async with serving(engine) as (_, _client):
        server_address = _.address
        await asyncio.to_thread(blocking, server_address)
        await until(lambda: not engine.running)
    assert len(engine.aborted) == 2
