"""Preemption of each kind at each single step of a run, and at every step of it: nobody's tokens change."""

from __future__ import annotations

import pytest

from jserve.scheduler import PreemptionSettings
from tests.scheduler.test_beams import STOPS, alone, found
from tests.support.arrivals import PreemptsAtEveryStep
from tests.support.host_engine import HostEngine, beams, expected_output, group, output, sequence

SHARED = [(3 + 7 * i) % 1000 for i in range(22)]
SHAPES = {
    "one pool": dict(num_blocks=80),
    "windows": dict(num_blocks=80, windows=(None, 9)),
    "host tier": dict(num_blocks=30, host_tier=True),
    "no prefix cache": dict(num_blocks=80, prefix_cache=False),
}
CASES = [("one pool", False), ("one pool", True), ("windows", True), ("host tier", False), ("no prefix cache", True)]


class Work:
    """A long prompt, one that begins alike, a short one, samples and beams; most of them run at once."""

    def __init__(self, kind: str, overlap: bool, shape: str):
        self.engine = HostEngine(
            **SHAPES[shape], overlap=overlap, checks_kv=True, max_num_seqs=7, num_host_blocks=90,
            preemption=PreemptionSettings(kind),
        )
        self.single = [sequence("a", SHARED + [1], 9), sequence("b", SHARED + [2, 3], 6), sequence("c", [9], 12)]
        self.samples = group("s", SHARED[:9], 6, 2)
        self.beams = beams("m", SHARED[:13], 5, 3, **STOPS)
        self.engine.add(*self.single)
        self.engine.add_group(self.samples)
        self.engine.add_group(self.beams)

    @property
    def goes_on(self) -> bool:
        return bool(self.engine.scheduler.has_work or self.engine.in_flight)

    def check(self) -> None:
        """Each has what it gets alone, and nothing is owned in either memory."""
        engine = self.engine
        for one, count in (*zip(self.single, (9, 6, 12)), *((one, 6) for one in self.samples)):
            assert output(one) == expected_output(one.tokens[: one.num_prompt].tolist(), count, one.index)
        assert found(self.beams[0].search) == alone(SHARED[:13], self.beams[0].sampling)
        seating = engine.scheduler._seating
        seating.release_returned()
        assert not seating._away and engine.scheduler.num_waiting == engine.blocks.num_used_blocks == 0
        assert all((owners == 0).all() for owners in engine.blocks._swap.owners)


def num_steps(kind: str, overlap: bool, shape: str) -> int:
    work, steps = Work(kind, overlap, shape), 0
    while work.goes_on:
        work.engine.step()
        steps += 1
    work.check()
    return steps


@pytest.mark.parametrize("kind", ["recompute", "swap"])
@pytest.mark.parametrize(("shape", "overlap"), CASES)
def test_a_preemption_at_any_step_changes_nothing(shape, overlap, kind):
    num_swapped = 0
    for at in range(num_steps(kind, overlap, shape)):
        for last in (True, False):
            work, steps, again = Work(kind, overlap, shape), 0, None
            scheduler = work.engine.scheduler
            while work.goes_on:
                work.engine.step()
                running = scheduler.running()
                if steps == at and running:
                    again = running[-1 if last else 0]
                    scheduler._preempt(again)
                elif again in running:  # as soon as it is back: twice in a row
                    scheduler._preempt(again)
                    again = None
                steps += 1
                assert steps < 500, "no progress"
            work.check()
            num_swapped += scheduler.num_swap_preemptions
    assert (num_swapped > 0) == (kind == "swap")


@pytest.mark.parametrize("kind", ["recompute", "swap"])
@pytest.mark.parametrize(("shape", "overlap"), CASES)
def test_preemptions_at_every_step_change_nothing(shape, overlap, kind):
    work, preempts, steps = Work(kind, overlap, shape), PreemptsAtEveryStep(), 0
    while work.goes_on:
        work.engine.step()
        preempts(work.engine.scheduler)
        assert work.engine.blocks.check_integrity() == []
        steps += 1
        assert steps < 2000, "no progress"
    work.check()
    assert 2 * preempts.num_preempted > steps
    assert (work.engine.scheduler.num_swap_preemptions > 10) == (kind == "swap")
