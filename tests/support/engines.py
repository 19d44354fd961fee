"""Real engines for tests: built as users build them, from a checkpoint on disk, with small buckets and a shared compile cache."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jserve.config import Config
from jserve.engine.async_engine import AsyncEngine
from jserve.engine.build import build_engine
from jserve.request import GenerateRequest, GenerateUpdate, SamplingParams
from jserve.runner import executable_store

GREEDY = {"temperature": 0.0}
CACHE = Path(tempfile.gettempdir()) / f"jserve-tests-{os.getuid()}"
"""Executables that the tests' engines share, apart from the user's own."""

executable_store.MOST_SETS = 128  # a run has more kinds of engines than a user, and would compile most of them again


def config_for(path: Path, *, every_bucket: bool = False, **sections: dict[str, Any]) -> Config:
    """A small engine's config; `sections` change it as in TOML.  One bucket of each kind, so that it compiles quickly,
    unless `every_bucket`."""
    config = Config().replace("model", path=str(path))
    config = config.replace("compile", cache_dir=str(CACHE))
    config = config.replace("kv", memory_bytes=64 * 2**20, block_size=16)
    config = config.replace("scheduler", max_num_batched_tokens=32, max_num_seqs=4)
    for section, values in sections.items():
        config = config.replace(section, **values)
    if not every_bucket and not config.compile.deterministic:
        budget = config.scheduler.max_num_batched_tokens
        slots = min(budget, config.scheduler.max_num_seqs)
        config = config.replace("compile", token_buckets=(budget,), sequence_buckets=(slots,))
    return config


@contextmanager
def running_engine(path: Path, **sections: Any) -> Iterator[AsyncEngine]:
    """A ready engine that checks its books after every step, and that it owns nothing at the end."""
    engine = build_engine(config_for(path, **sections))
    violations: list[str] = []
    engine._loop.on_step = lambda scheduler: violations.extend(scheduler.blocks.check_integrity())
    try:
        yield engine
        assert violations == []
        loads = engine.loads()
        assert (loads.num_running, loads.num_waiting, loads.kv_usage) == (0, 0, 0.0)
        assert loads.compiles_after_ready == 0
        assert loads.requests_accepted == num_ended(loads)
    finally:
        engine.stop()


def num_ended(loads) -> int:
    """Requests that have ended, however."""
    return loads.requests_stopped + loads.requests_length + loads.requests_aborted + loads.requests_failed


def run(work: Awaitable[Any], timeout_s: float = 120) -> Any:
    """The result of a coroutine on a loop of its own."""
    return asyncio.run(asyncio.wait_for(work, timeout_s))


def request(prompt: str | Sequence[int], max_tokens: int, **params: Any) -> GenerateRequest:
    """A greedy request unless `params` say otherwise."""
    params = SamplingParams(**{**GREEDY, "max_tokens": max_tokens, **params})
    if isinstance(prompt, str):
        return GenerateRequest(prompt=prompt, sampling_params=params)
    return GenerateRequest(prompt_token_ids=list(prompt), sampling_params=params)


def answers(engine: AsyncEngine, requests: Sequence[GenerateRequest]) -> list[GenerateUpdate]:
    """All requests at once; their whole answers, in order."""

    async def all_of_them() -> list[GenerateUpdate]:
        return await asyncio.gather(*(engine.generate_all(one) for one in requests))

    return run(all_of_them())


def token_ids(update: GenerateUpdate) -> list[int]:
    return update.outputs[0].token_ids


def wait_idle(engine: AsyncEngine, timeout_s: float = 10) -> None:
    """Waits until the engine has nothing to do, owns no block, and has counted every request's end."""
    done = threading.Event()
    for _ in range(int(timeout_s / 0.02)):
        loads = engine.loads()
        idle = loads.num_running == loads.num_waiting == loads.kv_usage == 0
        if idle and loads.requests_accepted == num_ended(loads):
            return
        done.wait(0.02)
    raise AssertionError(f"still busy after {timeout_s} s: {engine.loads()}")
