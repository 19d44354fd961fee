"""Requests that come, leave and are preempted at odd moments, and what they must have got all the same."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from jserve.engine.async_engine import AsyncEngine
from jserve.scheduler import Scheduler
from jserve.scheduler import Sequence as OneSequence
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
    """Preempts a running sequence after every fifth step, whatever is in flight; which one: PreemptsAtEveryStep."""
    check, steps, preempts = engine._loop.on_step, itertools.count(1), PreemptsAtEveryStep()

    def on_step(scheduler) -> None:
        if next(steps) % every == 0:
            preempts(scheduler)
        check(scheduler)

    engine._loop.on_step = on_step


class PreemptsAtEveryStep:
    """Called after each step, preempts a running sequence (with its siblings): the last one that has come further than
    when it was preempted last, for one that never gets to compute anything never ends."""

    def __init__(self):
        self._furthest: dict[object, tuple[int, int]] = {}
        self.num_preempted = 0

    def __call__(self, scheduler: Scheduler) -> None:
        for one in reversed(scheduler.running()):
            unit, progress = one.group or one, _progress(scheduler, one)
            if progress > self._furthest.get(unit, (0, 0)):
                self._furthest[unit] = progress
                scheduler._preempt(one)
                self.num_preempted += 1
                return


def _progress(scheduler: Scheduler, sequence: OneSequence) -> tuple[int, int]:
    """(tokens known, tokens in full blocks that can be found again), with its siblings; never falls."""
    members = [sequence] if sequence.group is None else sequence.group.members
    blocks = scheduler.blocks
    computed = [blocks.num_computed(one.slot) // blocks.block_size for one in members if one.slot is not None]
    return sum(one.num_known for one in members), max(computed)
