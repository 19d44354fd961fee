"""SmolLM2 behind a real gRPC server, one for all conformance tests, and a blocking client of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from jserve.engine.build import build_engine
from jserve.loop_thread import LoopThread
from jserve.request import GenerateRequest, GenerateUpdate
from jserve.server.app import Server
from jserve.server.client import Client
from tests.support.conformance import PROMPT, request
from tests.support.engines import config_for
from tests.support.grpc_server import config
from tests.support.smollm2 import smollm2_gguf

Ask = Callable[..., GenerateUpdate]


@pytest.fixture(scope="session")
def engine():
    sections = {"scheduler": {"max_num_batched_tokens": 64, "max_num_seqs": 8}, "kv": {"memory_bytes": 128 * 2**20}}
    engine = build_engine(config_for(smollm2_gguf(), **sections))
    yield engine
    engine.stop()


@pytest.fixture(scope="session")
def client(engine):
    async def started() -> Server:
        server = Server(config())
        await server.start()
        server.attach(engine)
        return server

    with closing(LoopThread("conformance-server")) as loop:
        server = loop.run(started())
        with Client(server.address) as client:
            yield client
        loop.run(server.stop())


@pytest.fixture(scope="session")
def ask(client) -> Ask:
    """ask(prompt=..., **params): the whole answer over gRPC, greedy unless the params say otherwise."""

    def ask(prompt: str | list[int] = PROMPT, **params) -> GenerateUpdate:
        return client.generate_unary(request(prompt, **params))

    return ask


@pytest.fixture(scope="session")
def ask_together(client) -> Callable[[list[GenerateRequest]], list[GenerateUpdate]]:
    """The whole answers of requests that run at the same time."""

    def ask_together(requests: list[GenerateRequest]) -> list[GenerateUpdate]:
        with ThreadPoolExecutor(len(requests)) as threads:
            return list(threads.map(client.generate_unary, requests))

    return ask_together
