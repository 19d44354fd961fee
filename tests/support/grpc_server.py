"""Servers for tests of jserve.server: in this event loop around a FakeEngine, or in a process of their own."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from jserve.config import Config
from jserve.http.front import http_front
from jserve.server.app import Server
from jserve.server.async_client import AsyncClient


def config(**server) -> Config:
    return Config().replace("server", **{"port": 0, **server})


@contextlib.asynccontextmanager
async def serving(engine, **server_section) -> AsyncIterator[tuple[Server, AsyncClient]]:
    """A server with the engine attached (None: it goes on starting), and a client of it."""
    server = Server(config(**server_section))
    await server.start()
    try:
        async with http_front(server):
            if engine is not None:
                server.attach(engine)
            async with AsyncClient(server.address) as client:
                yield server, client
    finally:
        await server.stop()


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Waits until the condition holds; fails where it never does."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition never held"
        await asyncio.sleep(0.005)


@contextlib.contextmanager
def server_process(*arguments: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """`tests/support/fake_server.py` with these arguments, and its address; killed at the end if it still runs."""
    with _process(arguments) as (process, words):
        yield process, words[0]


@contextlib.contextmanager
def http_server_process(*arguments: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """The same with HTTP, and its URL."""
    with _process(("--http-port", "0", *arguments)) as (process, words):
        yield process, words[1]


@contextlib.contextmanager
def _process(arguments: Sequence[str]) -> Iterator[tuple[subprocess.Popen, list[str]]]:
    process = subprocess.Popen([sys.executable, "-m", "tests.support.fake_server", *arguments],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert line.startswith("listening "), (line, process.stderr.read())
        yield process, line.split()[1:]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
