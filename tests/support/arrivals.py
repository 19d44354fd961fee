"""Requests that come, leave and are preempted at odd moments, and what they must have got all the same."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from jserve.engine.async_engine import AsyncEngine
from tests.support.engines import request, run, wait_idle

Work = Sequence[tuple[list[int], int, float, bool]]
"""(prompt, tokens, seconds after the start, whether the client leaves with its first token)."""


def ids_under_arrivals(engine: AsyncEngine, work: Work) -> list[list[int]]:
    """Greedy token ids that each client got; the engine is idle afterwards."""

    async def one(prompt, num_tokens, delay_s, cancels):
        await asyncio.sleep(delay_s)
        got: list[int] = []
        updates = engine.generate(request(prompt, num_tokens, ignore_eos=True))
        async for update in updates:
            got += [token for delta in update.outputs for token in delta.token_ids]
            if cancels:
                break
        await updates.aclose()
        return got

    async def everything():
        return await asyncio.gather(*(one(*item) for item in work))

    results = run(everything())
    wait_idle(engine)
    return results


def assert_as_naive(work: Work, results: list[list[int]], naive: Callable[[list[int], int], list[int]]) -> None:
    """Each got what `naive` continues its prompt with; who left, the beginning of that."""
    for (prompt, num_tokens, _, cancels), got in zip(work, results):
        want = naive(prompt, num_tokens)
        assert got == (want[: len(got)] if cancels else want)


def force_preemptions(engine: AsyncEngine, every: int = 5) -> None:
    """Preempts the last running sequence after every fifth step, whatever is in flight."""
    check, steps = engine._loop.on_step, itertools.count(1)

    def on_step(scheduler) -> None:
        if next(steps) % every == 0 and (running := scheduler.running()):
            scheduler._preempt(running[-1])
        check(scheduler)

    engine._loop.on_step = on_step
