"""File descriptors run out: the limit is raised at start where that is possible, and a server without any left recovers."""

import asyncio
import contextlib
import logging
import os
import resource
import socket
import urllib.request

import pytest

from jserve.config import ServerSection
from jserve.request import GenerateRequest, SamplingParams
from jserve.server import open_files
from jserve.server.async_client import AsyncClient
from tests.support.fake_engine import whole_text
from tests.support.grpc_server import http_server_process, server_process


@pytest.mark.parametrize(
    "limits, becomes, warned",
    [
        ((256, 4096), (1280, 4096), False),
        ((256, 512), (512, 512), True),
        ((256, resource.RLIM_INFINITY), (1280, resource.RLIM_INFINITY), False),
        ((2048, 4096), None, False),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None, False),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_it_goes(monkeypatch, caplog, limits, becomes, warned):
    asked = []
    monkeypatch.setattr(open_files.resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(open_files.resource, "setrlimit", lambda which, value: asked.append(value))
    with caplog.at_level(logging.WARNING):
        open_files.allow_open_files(ServerSection(max_concurrent_streams=1024))
    assert asked == ([becomes] if becomes else [])
    assert ("512 open files allowed" in caplog.text) == warned


@pytest.mark.parametrize("front", [server_process, http_server_process])
async def test_a_server_that_ran_out_of_files_serves_again_when_there_are_some(front):
    with front() as (process, address):
        assert process.stdout.readline().startswith("ready ")
        grpc_address = address if front is server_process else None
        host, _, port = address.removeprefix("http://").rpartition(":")
        num_open = len(os.listdir(f"/proc/{process.pid}/fd"))
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (num_open + 8, num_open + 8))
        with contextlib.ExitStack() as connections:
            for _ in range(40):  # the kernel takes what the server cannot
                connections.enter_context(socket.create_connection((host, int(port)), timeout=5))
            await asyncio.sleep(0.5)
            assert process.poll() is None
        end = asyncio.get_running_loop().time() + 60
        while True:  # gRPC looks again after a while
            try:
                assert await serves(grpc_address, address)
                break
            except (OSError, RuntimeError, TimeoutError):
                assert process.poll() is None and asyncio.get_running_loop().time() < end
                await asyncio.sleep(0.2)


async def serves(grpc_address: str | None, url: str) -> bool:
    if grpc_address is None:
        with await asyncio.to_thread(urllib.request.urlopen, f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    async with AsyncClient(grpc_address) as client:
        request = GenerateRequest(prompt="p", sampling_params=SamplingParams(max_tokens=2))
        result = await asyncio.wait_for(client.generate_unary(request), 5)
    return result.outputs[0].text == whole_text(2)
