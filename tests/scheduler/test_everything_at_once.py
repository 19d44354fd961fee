"""All that the scheduler and the KV memory can do, drawn at random, at once: outputs are right and nothing is left.

Layer groups with windows, tiers, a slow disk, preemption of each kind, samples, beams, salts, bypass, policies, aborts
of one or of all, flushes.
"""

from __future__ import annotations

import numpy as np
import pytest

from jserve.scheduler import POLICIES, PolicySettings, PreemptionSettings, tier_waits
from tests.scheduler.test_beams import STOPS, alone, found
from tests.support.arrivals import PreemptsAtEveryStep
from tests.support.host_engine import HostEngine, beams, expected_output, group, output, sequence

SMALLEST = {None: 19, 5: 4, 9: 5, 14: 7}
"""By window: blocks that hold the longest sequence."""
SHAPES = [(None,), (None,), (9,), (None, 9), (None, 5, 14)]
NUM_STEPS = 45
"""In which requests arrive."""


class Run:
    """One drawn engine and its requests."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch):
        self.random = random = np.random.default_rng(seed)
        self.now = 0.0
        windows, spare = SHAPES[random.integers(len(SHAPES))], int(random.integers(1, 26))
        has_tier = random.random() < 0.7
        self.has_disk = has_tier and random.random() < 0.5
        self.engine = HostEngine(
            windows=windows, num_blocks=tuple(SMALLEST[one] + 1 + int(random.integers(spare)) for one in windows),
            max_tokens=80, checks_kv=True, overlap=bool(random.integers(2)), budget=int(random.integers(4, 40)),
            prefix_cache=has_tier or random.random() < 0.8, max_num_seqs=int(random.integers(4, 8)),
            num_host_blocks=int(random.choice([2, 5, 12, 40, 90])), host_tier=has_tier, has_disk=self.has_disk,
            preemption=PreemptionSettings(("recompute", "swap", "auto")[random.integers(3)], 1e-4),
            policy=PolicySettings(POLICIES[random.integers(len(POLICIES))], ageing_s=5.0),
            step_cost_tokens=int(random.choice([1, 8])),
        )
        monkeypatch.setattr(tier_waits, "LOADS_PER_STEP", int(random.choice([1, 3, 16])))
        if self.has_disk:
            self.engine.scheduler.tiers._clock = lambda: self.now
            self.engine.store.complete_all = self._complete_some
        families = random.integers(0, 90, (2, 45)).tolist()
        self.parties = [self._party(name, families) for name in range(int(random.integers(1, 9)))]
        self.arrivals = random.integers(0, NUM_STEPS - 5, len(self.parties)).tolist()
        self.aborted: set = set()

    def _party(self, name: int, families: list[list[int]]) -> list:
        random = self.random
        tokens = families[random.integers(2)][: random.integers(0, 44)] + [int(random.integers(90))]
        most, kind = int(random.integers(1, 26)), int(random.integers(4))
        if kind == 3:
            members = beams(str(name), tokens, most, int(random.integers(2, 5)), **STOPS)
        else:
            members = group(str(name), tokens, most, int(random.integers(2, 4)) if kind == 2 else 1)
        salt, uses_cache = (b"", b"tenant")[random.random() < 0.2], random.random() < 0.9
        for one in members:
            one.salt, one.use_prefix_cache, one.arrival = salt, uses_cache, float(name)
        return members

    def _complete_some(self) -> None:
        while self.engine.store.under_way and self.random.random() < 0.6:
            self.engine.store.complete(int(self.random.integers(99)), fails=self.random.random() < 0.1)

    def go(self) -> None:
        random, engine, scheduler = self.random, self.engine, self.engine.scheduler
        every, preempts = int(random.choice([0, 0, 3, 7, 1])), PreemptsAtEveryStep()
        flushes, aborts = random.random() < 0.3, float(random.choice([0, 0.02, 0.1]))
        for step in range(3000):
            for members in [one for one, arrival in zip(self.parties, self.arrivals) if arrival == step]:
                engine.add_group(members)
            if random.random() < aborts:
                self._abort([one for one, at in zip(self.parties, self.arrivals) if at <= step])
            if every == 1:
                preempts(scheduler)
            elif every and step % every == 0 and step < 200 and (running := scheduler.running()):
                scheduler._preempt(running[random.integers(len(running))])
            if flushes and random.random() < 0.03:
                engine.blocks.flush()
            if random.random() < 0.02:
                self.now += 20.0  # whoever waits for the disk gives up
            if scheduler.has_work or engine.in_flight:
                engine.step()
            elif step > NUM_STEPS:
                return
        raise AssertionError("no progress")

    def _abort(self, parties: list[list]) -> None:
        alive = [members for members in parties if not all(one.finished for one in members)]
        if alive:
            members = alive[self.random.integers(len(alive))]
            one_alone = members[0].search is None and self.random.random() < 0.5
            for one in [members[self.random.integers(len(members))]] if one_alone else members:
                if not one.finished:
                    self.aborted.add(one)
                    self.engine.abort(one)

    def check_outputs(self) -> None:
        for members in self.parties:
            tokens = members[0].tokens[: members[0].num_prompt].tolist()
            assert all(one.finished for one in members)
            if members[0].search is None:
                for one in members:
                    count = one.num_output if one in self.aborted else one.limit - one.num_prompt
                    assert output(one) == expected_output(tokens, count, one.index)
            elif not {members[0]} & {*self.aborted, *self.engine.outgrown}:
                assert found(members[0].search) == alone(tokens, members[0].sampling)

    def check_nothing_is_left(self) -> None:
        engine, scheduler = self.engine, self.engine.scheduler
        seating = scheduler._seating
        assert scheduler.num_waiting == scheduler._num_parked == scheduler._waiting.num_tokens == 0
        assert scheduler.num_running == engine.blocks.num_used_blocks == 0 and not scheduler.awaits_tier
        assert not seating._away and not seating._carried and not seating.beams._with_forks
        assert not scheduler.prefixes._waiting and not scheduler.prefixes._computing
        engine.blocks.flush()
        engine.run([sequence("last", [999], 1)])  # copies that are due go with its step
        if self.has_disk:
            while engine.store.under_way:
                engine.store.complete()
                engine.blocks.tiers.poll()
            engine.blocks.tiers.poll()
        assert all((pool.num_owners[1:] == 0).all() for pool in engine.blocks._swap.pools)
        engine.blocks.flush()
        assert engine.blocks._cache._index.num_nodes == 0 and engine.blocks.check_integrity() == []


def go(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    num_preemptions = num_hits = 0
    for seed in seeds:
        run = Run(seed, monkeypatch)
        try:
            run.go()
            run.check_outputs()
            run.check_nothing_is_left()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        num_preemptions += run.engine.scheduler.num_preemptions
        num_hits += run.engine.blocks.tier_stats.num_host_hit_tokens
    assert num_preemptions > len(seeds) and num_hits > 0


@pytest.mark.parametrize("first", [0, 25])
def test_each_output_is_right_and_nothing_is_left(first, monkeypatch):
    go(range(first, first + 25), monkeypatch)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_each_output_is_right_and_nothing_is_left_for_long(monkeypatch):
    go(range(1000, 4000), monkeypatch)
