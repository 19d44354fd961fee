"""How many tokens the steps of a trace have, and the token buckets that pad them least."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from jserve.planner.bucket_choice import choose_buckets
from jserve.scheduler.buckets import powers_up_to
from jserve.simulator.clock import simulate
from jserve.simulator.engine import EngineSettings, EngineSystem
from jserve.simulator.steps import SimStep, StepSeconds, one_second
from jserve.simulator.workload import SimRequest


@dataclass(frozen=True)
class BucketPlan:
    token_buckets: tuple[int, ...]
    padded_share: float
    """Of all tokens computed in mixed steps, simulated with these buckets."""
    padded_share_powers: float
    """The same with as many powers of two as fit."""
    num_mixed_steps: int


def plan_buckets(
    requests: Sequence[SimRequest],
    num_buckets: int,
    settings: EngineSettings,
    *,
    concurrency: int | None,
    step_seconds: StepSeconds = one_second,
) -> BucketPlan:
    """The at most `num_buckets` token buckets of least padding over the steps that these requests make.

    The scheduler runs once as if every size were compiled; dynamic programming over the sizes that came up gives the
    buckets; it then runs with them, since it fills buckets where it can.
    """

    def sizes(buckets: tuple[int, ...] | None) -> list[SimStep]:
        recorded = _Recorded(dataclasses.replace(settings, token_buckets=buckets, step_cost_tokens=32))
        simulate(recorded, requests, step_seconds, concurrency=concurrency)
        return recorded.mixed

    budget = settings.max_num_batched_tokens
    counts = Counter(step.num_useful for step in sizes(tuple(range(1, budget + 1))))
    chosen = choose_buckets(counts, num_buckets, budget)
    powers = powers_up_to(16, budget)[-num_buckets:]
    steps = sizes(chosen)
    return BucketPlan(chosen, _padded_share(steps), _padded_share(sizes(powers)), len(steps))


class _Recorded(EngineSystem):
    """Remembers its mixed steps; those of decodes alone run in sequence buckets."""

    def __init__(self, settings: EngineSettings):
        super().__init__(settings)
        self.mixed: list[SimStep] = []

    def schedule(self, now: float) -> SimStep | None:
        step = super().schedule(now)
        if step is not None and not step.about.decode_only:
            self.mixed.append(step)
        return step


def _padded_share(steps: Sequence[SimStep]) -> float:
    computed = sum(step.num_tokens for step in steps)
    return 1 - sum(step.num_useful for step in steps) / computed if computed else 0.0
