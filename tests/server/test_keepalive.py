"""Pings are welcome, and a client that is there but answers nothing does not hold blocks for ever."""

import asyncio
import os
import signal
import subprocess
import sys

import grpc
import pytest

from jserve.proto_gen import inference_pb2 as pb
from jserve.proto_gen import inference_pb2_grpc
from tests.support.fake_engine import FakeEngine
from tests.support.grpc_server import serving, until

STREAMING_CLIENT = """
import sys
from jserve.request import GenerateRequest, SamplingParams
from jserve.server.client import Client
for _ in Client(sys.argv[1]).generate(GenerateRequest(prompt="p", sampling_params=SamplingParams(max_tokens=10**6))):
    print("streaming", flush=True)
"""


@pytest.mark.soak
@pytest.mark.parametrize("with_call", [False, True], ids=["idle", "in a call"])
async def test_pings_every_ten_seconds_are_welcome(with_call):
    """A server that minds closes the connection at the third ping (GOAWAY, too_many_pings)."""
    engine = FakeEngine()
    engine.go.clear()
    pinging = [("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_permit_without_calls", 1),
               ("grpc.http2.max_pings_without_data", 0)]
    async with serving(engine) as (server, _), grpc.aio.insecure_channel(server.address, options=pinging) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        await channel.channel_ready()
        call = asyncio.ensure_future(stub.GenerateUnary(pb.GenerateRequest(prompt="p"))) if with_call else None
        left_ready = asyncio.ensure_future(channel.wait_for_state_change(grpc.ChannelConnectivity.READY))
        _, pending = await asyncio.wait([left_ready], timeout=65)
        assert pending, "the connection was closed"
        left_ready.cancel()
        engine.go.set()
        if call is not None:
            assert (await call).usage.completion_tokens == 5


@pytest.mark.soak
async def test_a_client_that_hangs_is_dropped_within_its_keepalive():
    engine = FakeEngine(step_s=1.0)
    async with serving(engine) as (server, _):
        client = subprocess.Popen([sys.executable, "-c", STREAMING_CLIENT, server.address], stdout=subprocess.PIPE)
        try:
            assert await asyncio.to_thread(client.stdout.readline)
            os.kill(client.pid, signal.SIGSTOP)
            await until(lambda: engine.aborted and not server.state.calls, timeout_s=50)
        finally:
            client.kill()
            client.communicate()
