"""SmolLM2 behind a real gRPC server, one for all conformance tests, and a blocking client of it.

Whatever uses `ask` runs once under each surrounding: the sampler that the request itself needs, and larger ones, as in
a batch with others who need them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import pytest

from jserve.engine.build import build_engine
from jserve.loop_thread import LoopThread
from jserve.request import GenerateRequest, GenerateUpdate
from jserve.server.app import Server
from jserve.sampling.sampler import SamplerKind, SamplerVariant
from jserve.server.client import Client
from tests.support.conformance import PROMPT, request
from tests.support.engines import config_for
from tests.support.grpc_server import config
from tests.support.smollm2 import smollm2_gguf

Ask = Callable[..., GenerateUpdate]
@dataclass(frozen=True)
class Needs:
    """What the neighbours of a request need of each step, beside what it needs itself."""

    draws: bool = False
    logprobs: bool = False
    shaped: bool = False


SURROUNDINGS = {
    "smallest": Needs(),
    "drawing": Needs(draws=True),
    "full": Needs(draws=True, logprobs=True, shaped=True),
}

@pytest.fixture(scope="session")
def engine():
    sections = {"scheduler": {"max_num_batched_tokens": 64, "max_num_seqs": 8}, "kv": {"memory_bytes": 128 * 2**20}}
    config = config_for(smollm2_gguf(), **sections)
    # Small steps for what runs alone, as most does here.
    engine = build_engine(config.replace("compile", token_buckets=(16, 64), sequence_buckets=(1, 8)))
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


@pytest.fixture(scope="session", params=SURROUNDINGS)
def surrounding(engine, request) -> Iterator[str]:
    """Runs every step as it would run among neighbours that need more than it; checks that it did."""
    needs = SURROUNDINGS[request.param]
    runner = engine._loop._runner
    sampling, shaping, programs = runner._sampling, runner._sampling.shaping, runner._programs
    variant, is_shaped, sample = sampling.variant, shaping.is_shaped, programs.sample

    def enlarged(slots) -> SamplerVariant:
        own = variant(slots)
        return SamplerVariant(SamplerKind.SAMPLE if needs.draws else own.kind, own.logprobs or needs.logprobs)

    ran: set[Needs] = set()

    def recorded(variant, logits, slot_tokens, packed, shaped=None):
        ran.add(Needs(variant.kind is SamplerKind.SAMPLE, variant.logprobs, shaped is not None))
        return sample(variant, logits, slot_tokens, packed, shaped)

    sampling.variant, programs.sample = enlarged, recorded
    shaping.is_shaped = lambda slots: needs.shaped or is_shaped(slots)
    yield request.param
    sampling.variant, shaping.is_shaped, programs.sample = variant, is_shaped, sample
    for one in ran:
        assert one.draws >= needs.draws and one.logprobs >= needs.logprobs and one.shaped >= needs.shaped


@pytest.fixture(scope="session")
def ask(client, surrounding) -> Ask:
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
