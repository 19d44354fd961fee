"""SIGTERM, Control.Drain and the exit code, in processes of their own."""

import asyncio
import signal
import subprocess
import time

import pytest

from jserve.request import Code, GenerateRequest, RequestError, SamplingParams
from jserve.server.async_client import AsyncClient
from jserve.server.client import Client
from tests.support.fake_engine import FakeEngine, whole_text
from tests.support.grpc_server import server_process, serving, until

LONG = GenerateRequest(prompt="p", sampling_params=SamplingParams(max_tokens=60))  # 0.6 s at 10 ms a token
ENDLESS = GenerateRequest(prompt="p", sampling_params=SamplingParams(max_tokens=10**6))


def wait_ready(process) -> None:
    assert process.stdout.readline().startswith("ready ")


async def read_text(client: AsyncClient, request: GenerateRequest) -> str:
    return "".join([delta.text async for update in client.generate(request) for delta in update.outputs])


async def started_streams(client: AsyncClient, requests, num_running: int) -> list[asyncio.Task]:
    streams = [asyncio.create_task(read_text(client, request)) for request in requests]
    while (await client.loads()).num_open_streams < len(streams) or (await client.loads()).num_running < num_running:
        await asyncio.sleep(0.01)
    return streams


async def exit_code(process: subprocess.Popen, within_s: float) -> int:
    return await asyncio.to_thread(process.wait, within_s)


@pytest.mark.parametrize("by", ["SIGTERM", "SIGINT", "Drain"])
async def test_a_drain_finishes_what_runs_and_waits_and_exits_0(by):
    with server_process("--max-running", "4") as (process, address):
        wait_ready(process)
        async with AsyncClient(address) as client:
            streams = await started_streams(client, [LONG] * 6, num_running=4)
            if by == "Drain":
                await client.drain()
            else:
                process.send_signal(getattr(signal, by))
            while await client.is_serving():
                await asyncio.sleep(0.01)
            with pytest.raises(RequestError, match="draining") as caught:
                await client.generate_unary(LONG)
            assert caught.value.code is Code.UNAVAILABLE
            assert (await client.server_info()).state == "draining"
            assert not any(stream.done() for stream in streams)
            assert await asyncio.gather(*streams) == [whole_text(60)] * 6
            assert await exit_code(process, 3) == 0


async def test_an_idle_server_exits_within_a_second():
    with server_process() as (process, address):
        wait_ready(process)
        async with AsyncClient(address) as client:
            assert await client.is_serving()
            started = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert await exit_code(process, 3) == 0
            assert time.monotonic() - started < 1.0


async def test_a_second_signal_cuts_what_is_open():
    with server_process() as (process, address):
        wait_ready(process)
        async with AsyncClient(address) as client:
            [stream] = await started_streams(client, [ENDLESS], num_running=1)
            process.send_signal(signal.SIGTERM)
            while await client.is_serving():
                await asyncio.sleep(0.01)
            started = time.monotonic()
            process.send_signal(signal.SIGTERM)
            with pytest.raises(RequestError, match="stopped before the request was finished") as caught:
                await stream
            assert caught.value.code is Code.UNAVAILABLE
            assert await exit_code(process, 3) == 0
            assert time.monotonic() - started < 2.0


@pytest.mark.parametrize("by", ["config", "call"])
async def test_the_drain_timeout_cuts_what_is_left(by):
    with server_process(*(["--drain-timeout-s", "0.4"] if by == "config" else [])) as (process, address):
        wait_ready(process)
        async with AsyncClient(address) as client:
            [stream] = await started_streams(client, [ENDLESS], num_running=1)
            started = time.monotonic()
            if by == "config":
                process.send_signal(signal.SIGTERM)
            else:
                await client.drain(timeout_s=0.4)
            with pytest.raises(RequestError) as caught:
                await stream
            assert caught.value.code is Code.UNAVAILABLE
            assert 0.3 < time.monotonic() - started < 2.0
            assert await exit_code(process, 3) == 0


def test_a_signal_while_starting_exits_at_once():
    with server_process("--start-s", "60") as (process, address), Client(address) as client:
        assert not client.is_serving()
        with pytest.raises(RequestError, match="not ready within 0.3 s"):
            client.wait_until_ready(0.3)
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(3) == 0
        assert time.monotonic() - started < 1.0


def test_clients_can_wait_for_a_server_that_starts():
    with server_process("--start-s", "0.5") as (process, address), Client(address) as client:
        client.wait_until_ready(5)
        assert client.generate_unary(GenerateRequest(prompt="p")).usage.completion_tokens == 5


async def test_an_engine_that_stops_by_itself_ends_the_server_with_1():
    with server_process("--stop-after-s", "1") as (process, address):
        wait_ready(process)
        async with AsyncClient(address) as client:
            [stream] = await started_streams(client, [ENDLESS], num_running=1)
            with pytest.raises(RequestError) as caught:
                await stream
            assert caught.value.code is Code.UNAVAILABLE
            assert await exit_code(process, 3) == 1


async def test_a_reader_that_does_not_read_does_not_outlast_the_drain():
    engine = FakeEngine()
    async with serving(engine, drain_timeout_s=0.2) as (server, client):
        stream = client.generate(GenerateRequest(prompt="p", sampling_params=SamplingParams(max_tokens=200_000)))
        await anext(stream)
        started = time.monotonic()
        server.begin_drain()
        assert await server.finish_drain() == 1
        await server.stop()
        assert time.monotonic() - started < 2.0
        await until(lambda: not engine.running)
        await stream.aclose()
