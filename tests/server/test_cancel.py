"""Cancel, deadline and vanished clients free the engine at once."""

import asyncio
import random
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from jserve.proto_gen import inference_pb2 as pb
from jserve.request import Code, GenerateRequest, RequestError, SamplingParams
from jserve.server.client import Client
from jserve.server.inference_service import InferenceService
from jserve.server.state import ServerState
from tests.support.fake_engine import FakeEngine, whole_text
from tests.support.grpc_server import config, serving, until

ENDLESS = SamplingParams(max_tokens=10**6)


async def test_200_streams_cancelled_at_random_moments_leave_nothing_behind():
    engine = FakeEngine(step_s=0.002, max_running=50)
    draw = random.Random(1)

    async def start_and_leave(client, wait_s: float) -> None:
        async def read():
            async for _ in client.generate(GenerateRequest(prompt="p", sampling_params=ENDLESS)):
                pass

        reading = asyncio.create_task(read())
        await asyncio.sleep(wait_s)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    async with serving(engine) as (server, client):
        await asyncio.gather(*(start_and_leave(client, draw.random() * 0.5) for _ in range(200)))
        await until(lambda: not server.state.calls and not engine.running and not engine.waiting, timeout_s=1.0)
        assert sorted(engine.aborted) == sorted(request.request_id for request in engine.requests)
        results = await asyncio.gather(*(
            client.generate_unary(GenerateRequest(prompt="p", sampling_params=SamplingParams(max_tokens=4)))
            for _ in range(8)))
        assert {result.outputs[0].text for result in results} == {whole_text(4)}


async def test_a_cancelled_unary_call_is_aborted():
    engine = FakeEngine()
    engine.go.clear()
    async with serving(engine) as (server, client):
        call = asyncio.create_task(client.generate_unary(GenerateRequest(prompt="p")))
        await until(lambda: engine.running)
        call.cancel()
        await until(lambda: not engine.running and not server.state.calls, timeout_s=1.0)
    assert len(engine.aborted) == 1


@pytest.mark.parametrize("blocking", [False, True], ids=["asyncio client", "blocking client"])
@pytest.mark.parametrize("phase", ["queued", "running"])
async def test_a_deadline_ends_the_request_on_both_sides(phase, blocking):
    engine = FakeEngine(step_s=0.005, max_running=1)
    if phase == "queued":
        await engine._slots.acquire()
    async with serving(engine) as (server, client):
        request = GenerateRequest(prompt="p", sampling_params=ENDLESS, deadline=time.monotonic() + 0.3)

        def read_blocking():
            with Client(server.address) as blocking_client:
                list(blocking_client.generate(request))

        async def read():
            async for _ in client.generate(request):
                pass

        started = time.monotonic()
        with pytest.raises(RequestError) as caught:
            await (asyncio.to_thread(read_blocking) if blocking else read())
        assert caught.value.code is Code.DEADLINE_EXCEEDED
        assert 0.25 < time.monotonic() - started < 1.5
        await until(lambda: len(engine.aborted) == 1 and not server.state.calls, timeout_s=1.0)
        assert request.deadline - 0.1 < engine.requests[0].deadline < request.deadline + 0.1


async def test_a_deadline_that_has_passed_never_reaches_the_engine():
    engine = FakeEngine()
    state = ServerState(config())
    state.engine = engine
    with pytest.raises(RequestError) as caught:
        await InferenceService(state).GenerateUnary(
            pb.GenerateRequest(prompt="p"), SimpleNamespace(time_remaining=lambda: 0.0))
    assert caught.value.code is Code.DEADLINE_EXCEEDED
    assert engine.requests == [] and len(state.calls) == 0


async def test_an_engine_that_ends_a_request_at_its_deadline_is_believed():
    engine = FakeEngine()
    engine.failures["p"] = (2, RequestError(Code.DEADLINE_EXCEEDED, "the deadline passed after 2 tokens"))
    async with serving(engine) as (_, client):
        with pytest.raises(RequestError, match="after 2 tokens") as caught:
            await client.generate_unary(GenerateRequest(prompt="p"))
    assert caught.value.code is Code.DEADLINE_EXCEEDED


async def test_a_killed_client_process_frees_its_requests():
    engine = FakeEngine(step_s=0.005)
    script = """
import sys
from jserve.request import GenerateRequest, SamplingParams
from jserve.server.client import Client
endless = SamplingParams(max_tokens=10**6)
streams = [Client(sys.argv[1]).generate(GenerateRequest(prompt="p", sampling_params=endless)) for _ in range(3)]
for stream in streams: next(stream)
print("streaming", flush=True)
for _ in streams[0]: pass
"""
    async with serving(engine) as (server, client):
        victim = subprocess.Popen([sys.executable, "-c", script, server.address], stdout=subprocess.PIPE)
        try:
            assert await asyncio.to_thread(victim.stdout.readline) == b"streaming\n"
            assert len(engine.running) == 3
        finally:
            victim.kill()
            victim.communicate()
        await until(lambda: not engine.running and not server.state.calls, timeout_s=2.0)
        assert len(engine.aborted) == 3
        assert (await client.generate_unary(GenerateRequest(prompt="p"))).usage.completion_tokens == 5
