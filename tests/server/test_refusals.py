"""Bad input, full queues and bugs: one clear line, the right code, and the server lives on."""

import asyncio
import logging
import random

import grpc
import pytest

from jserve.proto_gen import control_pb2, control_pb2_grpc, inference_pb2 as pb, inference_pb2_grpc
from jserve.request import Code, GenerateRequest, RequestError
from jserve.server.app import CONTROL, INFERENCE
from jserve.server.errors import from_rpc_error
from tests.support.fake_engine import FakeEngine, whole_text
from tests.support.grpc_server import serving, until

PLAIN = GenerateRequest(prompt="p")
NOT_BUILT = {"SubscribeKvEvents", "LoadLora", "UnloadLora", "ListLoras"}


async def refused(awaitable) -> RequestError:
    """The error that a call ends with."""
    try:
        await awaitable
    except RequestError as error:
        return error
    except grpc.RpcError as error:
        return from_rpc_error(error)
    raise AssertionError("the call succeeded")


async def raw(client, method: str, data: bytes):
    """Sends bytes as the request of a unary method."""
    return await client._channel.unary_unary(method)(data)


async def assert_alive(client) -> None:
    assert (await client.generate_unary(PLAIN)).outputs[0].text == whole_text(5)


@pytest.mark.parametrize("error", [
    RequestError(Code.INVALID_ARGUMENT, "sampling_params.n = 0: must be in 1..64", field="sampling_params.n"),
    RequestError(Code.RESOURCE_EXHAUSTED, "the queue is full", retry_after_s=2.5),
    RequestError(Code.NOT_FOUND, "lora_name = 'x': no such adapter", field="lora_name"),
    RequestError(Code.FAILED_PRECONDITION, "not now"),
    RequestError(Code.ABORTED, "a line\nand another, 100%"),
], ids=lambda error: error.code.name)
@pytest.mark.parametrize("after", [0, 2])
async def test_the_client_gets_the_engines_error(error, after):
    engine = FakeEngine()
    engine.failures["bad"] = (after, error)
    bad = GenerateRequest(prompt="bad")

    async def stream():
        async for update in client.generate(bad):
            texts.extend(output.text for output in update.outputs)

    async with serving(engine) as (_, client):
        for call in (stream, lambda: client.generate_unary(bad)):
            texts = []
            got = await refused(call())
            assert (got.code, got.message, got.field, got.retry_after_s) == (
                error.code, error.message, error.field, error.retry_after_s)
            if call is stream:
                assert "".join(texts) == whole_text(after), "what was generated before came first"
        await assert_alive(client)


async def test_a_full_queue_says_when_to_try_again():
    engine = FakeEngine(max_running=1, max_waiting=2)
    engine.go.clear()
    async with serving(engine) as (_, client):
        calls = [asyncio.create_task(client.generate_unary(PLAIN)) for _ in range(3)]
        await until(lambda: len(engine.waiting) == 2 and len(engine.running) == 1)
        error = await refused(client.generate_unary(PLAIN))
        assert (error.code, error.retry_after_s) == (Code.RESOURCE_EXHAUSTED, 2.5)
        engine.go.set()
        await asyncio.gather(*calls)


@pytest.mark.parametrize("after", [0, 3])
async def test_a_bug_fails_one_request_and_is_logged_without_the_prompt(after, caplog):
    engine = FakeEngine(step_s=0.002)
    engine.failures["secret prompt"] = (after, KeyError("a bug"))
    async with serving(engine) as (server, client):
        others = [asyncio.create_task(client.generate_unary(PLAIN)) for _ in range(5)]
        with caplog.at_level(logging.ERROR):
            error = await refused(client.generate_unary(GenerateRequest(prompt="secret prompt", request_id="r-17")))
        assert error.code is Code.INTERNAL
        assert error.message == "internal error in request r-17: KeyError; the log has more"
        [record] = caplog.records
        assert "r-17" in record.getMessage() and record.exc_info and "secret prompt" not in caplog.text
        assert {result.outputs[0].text for result in await asyncio.gather(*others)} == {whole_text(5)}
        assert not server.state.calls


async def test_an_engine_that_forgets_the_ending_is_a_bug(caplog):
    engine = FakeEngine()

    async def no_ending(request):
        return
        yield

    engine.generate = no_ending
    async with serving(engine) as (_, client):
        error = await refused(client.generate_unary(PLAIN))
    assert error.code is Code.INTERNAL


@pytest.mark.parametrize("message", ["ä" * 100_000, "\U0001F600" * 50_000, "lone \ud800 surrogate", ""],
                         ids=["long", "emoji", "surrogate", "empty"])
async def test_any_error_text_fits_into_the_trailers(message):
    engine = FakeEngine()
    engine.failures["bad"] = (0, RequestError(Code.INVALID_ARGUMENT, message, field="prompt" * 100, retry_after_s=1))
    async with serving(engine) as (_, client):
        error = await refused(client.generate_unary(GenerateRequest(prompt="bad")))
        assert error.code is Code.INVALID_ARGUMENT
        assert error.message[:5] == (message[:5] or "INVAL")
        assert error.field.startswith("prompt") and error.retry_after_s == 1
        await assert_alive(client)


@pytest.mark.parametrize("method", ["Generate", "GenerateUnary"])
async def test_invalid_utf8_is_an_invalid_argument(method):
    data = pb.GenerateRequest(prompt="BAD!").SerializeToString().replace(b"BAD!", b"\xff\xfe\xfd\xfc")
    engine = FakeEngine()
    async with serving(engine) as (_, client):
        error = await refused(raw(client, f"/jserve.v1.Inference/{method}", data))
        assert (error.code, error.message) == (Code.INVALID_ARGUMENT, "prompt: not valid UTF-8")
        assert (error.field, engine.requests) == ("prompt", [])
        await assert_alive(client)


async def test_random_bytes_never_give_internal():
    draw = random.Random(2)
    methods = [f"/{service.full_name}/{method.name}" for service in (INFERENCE, CONTROL)
               for method in service.methods if method.name != "Drain"]
    codes = set()
    async with serving(FakeEngine()) as (server, client):
        for _ in range(300):
            try:
                await raw(client, draw.choice(methods), draw.randbytes(draw.randrange(1, 60)))
            except grpc.RpcError as error:
                codes.add(error.code())
        await assert_alive(client)
        assert not server.state.calls
    assert codes == {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED}


async def test_unknown_fields_and_enum_values_are_refused():
    async with serving(FakeEngine()) as (_, client):
        error = await refused(raw(client, "/jserve.v1.Inference/GenerateUnary", b"\x12\x01p\x98\x06\x01"))
        assert (error.code, error.field) == (Code.INVALID_ARGUMENT, "99")
        error = await refused(raw(client, "/jserve.v1.Control/FlushCache", b"\x98\x06\x01"))
        assert (error.code, error.field) == (Code.INVALID_ARGUMENT, "99")
        stub = inference_pb2_grpc.InferenceStub(client._channel)
        error = await refused(stub.GenerateUnary(pb.GenerateRequest(sampling_params={"early_stopping": 9})))
        assert error.field == "sampling_params.early_stopping"
        await assert_alive(client)


async def test_a_large_prompt_arrives_and_one_beyond_the_limit_is_refused():
    engine = FakeEngine(num_tokens=1)
    async with serving(engine, max_message_bytes=16 * 2**20) as (_, client):
        await client.generate_unary(GenerateRequest(prompt="x" * (10 * 2**20)))
        assert len(engine.requests[0].prompt) == 10 * 2**20
        error = await refused(client.generate_unary(GenerateRequest(prompt="x" * (17 * 2**20))))
        assert error.code is Code.RESOURCE_EXHAUSTED and "larger than max" in error.message
        assert len(engine.requests) == 1


async def test_what_is_not_built_says_so():
    async with serving(FakeEngine()) as (_, client):
        for service in (INFERENCE, CONTROL):
            for method in service.methods:
                if method.name in NOT_BUILT:
                    error = await refused(raw(client, f"/{service.full_name}/{method.name}", b""))
                    assert error.code is Code.UNIMPLEMENTED
                    assert error.message == f"{method.full_name} is not built yet"
        stub = control_pb2_grpc.ControlStub(client._channel)
        with pytest.raises(grpc.RpcError, match="SubscribeKvEvents is not built yet"):
            async for _ in stub.SubscribeKvEvents(control_pb2.SubscribeKvEventsRequest()):
                pass


async def test_generation_calls_beyond_the_limit_are_refused_at_once():
    engine = FakeEngine()
    engine.go.clear()
    async with serving(engine, max_concurrent_streams=10) as (server, client):
        calls = [asyncio.create_task(client.generate_unary(PLAIN)) for _ in range(30)]
        await until(lambda: sum(call.done() for call in calls) == 20)
        for call in calls:
            if call.done():
                error = await refused(call)
                assert (error.code, error.retry_after_s) == (Code.RESOURCE_EXHAUSTED, 1.0)
                assert "server.max_concurrent_streams" in error.message
        loads = await client.loads()
        assert (loads.num_open_streams, loads.max_open_streams, loads.num_running) == (10, 10, 10)
        engine.go.set()
        await until(lambda: all(call.done() for call in calls))
        await assert_alive(client)
