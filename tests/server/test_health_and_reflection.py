"""Health and reflection: always there, honest, and quick also when the server is full."""

import asyncio
import time

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jserve.request import Code, GenerateRequest, RequestError, SamplingParams
from tests.support.fake_engine import FakeEngine
from tests.support.grpc_server import serving, until

SERVICES = ["", "jserve.v1.Inference", "jserve.v1.Control"]
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
PLAIN = GenerateRequest(prompt="p")


async def test_health_follows_starting_ready_draining():
    async with serving(None) as (server, client):
        assert [await client.is_serving(service) for service in SERVICES] == [False] * 3
        with pytest.raises(RequestError, match="the server is starting") as caught:
            await client.generate_unary(PLAIN)
        assert (caught.value.code, caught.value.retry_after_s) == (Code.UNAVAILABLE, 1.0)
        server.attach(FakeEngine())
        assert [await client.is_serving(service) for service in SERVICES] == [True] * 3
        assert await client.generate_unary(PLAIN)
        server.begin_drain()
        assert [await client.is_serving(service) for service in SERVICES] == [False] * 3
        with pytest.raises(RequestError, match="draining") as caught:
            await client.generate_unary(PLAIN)
        assert caught.value.code is Code.UNAVAILABLE
        listed = await health_pb2_grpc.HealthStub(client._channel).List(health_pb2.HealthListRequest())
        assert {name: status.status for name, status in listed.statuses.items()} == dict.fromkeys(SERVICES, NOT_SERVING)
        with pytest.raises(RequestError) as caught:
            await client.is_serving("no.such.Service")
        assert caught.value.code is Code.NOT_FOUND


async def test_watchers_see_every_change_and_the_end():
    async with serving(None) as (server, client):
        stub = health_pb2_grpc.HealthStub(client._channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest(service=service)) for service in SERVICES]
        assert [(await watch.read()).status for watch in watches] == [NOT_SERVING] * 3
        server.attach(FakeEngine())
        assert [(await watch.read()).status for watch in watches] == [SERVING] * 3
        server.begin_drain()
        assert [(await watch.read()).status for watch in watches] == [NOT_SERVING] * 3
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="no.such.Service"))
        assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        started = time.monotonic()
        await server.stop()
        assert time.monotonic() - started < 0.4, "watchers do not hold up the stop"
        assert await watches[0].read() is grpc.aio.EOF


async def test_a_server_that_drains_before_it_is_ready_never_serves():
    engine = FakeEngine()
    async with serving(None) as (server, client):
        server.begin_drain()
        server.attach(engine)
        assert not await client.is_serving()
        assert engine.state == "draining"


async def test_reflection_lists_the_services_and_describes_their_messages():
    async with serving(None) as (_, client):
        stub = reflection_pb2_grpc.ServerReflectionStub(client._channel)
        Request = reflection_pb2.ServerReflectionRequest
        call = stub.ServerReflectionInfo(iter([
            Request(list_services=""), Request(file_containing_symbol="jserve.v1.Inference")]))
        listed, described = [response async for response in call]
    names = {service.name for service in listed.list_services_response.service}
    assert names == {"jserve.v1.Inference", "jserve.v1.Control", "grpc.health.v1.Health",
                     "grpc.reflection.v1alpha.ServerReflection"}
    files = [descriptor_pb2.FileDescriptorProto.FromString(data)
             for data in described.file_descriptor_response.file_descriptor_proto]
    messages = {message.name for file in files for message in file.message_type}
    assert {"GenerateRequest", "SamplingParams"} <= messages


async def test_check_and_control_answer_at_once_on_a_full_server():
    """The limit and 20 more open, watchers beside them: nothing waits behind generation."""
    engine = FakeEngine(step_s=0.02)
    async with serving(engine, max_concurrent_streams=100) as (server, client):
        endless = SamplingParams(max_tokens=10**6)

        async def read():
            async for _ in client.generate(GenerateRequest(prompt="p", sampling_params=endless)):
                pass

        stub = health_pb2_grpc.HealthStub(client._channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(10)]
        streams = [asyncio.create_task(read()) for _ in range(120)]
        await until(lambda: len(engine.running) == 100 and sum(stream.done() for stream in streams) == 20)
        for stream in streams:
            if stream.done():
                assert stream.exception().code is Code.RESOURCE_EXHAUSTED
        waits = []
        for _ in range(10):
            started = time.monotonic()
            assert await client.is_serving()
            checked = time.monotonic()
            assert await client.abort("unknown") is False
            waits += [checked - started, time.monotonic() - checked]
        # Client and 100 streams share one core and one loop with the server here, so one slow answer proves nothing.
        assert sorted(waits)[len(waits) // 2] < 0.1
        for call in (*watches, *streams):
            call.cancel()
        await until(lambda: not server.state.calls)
