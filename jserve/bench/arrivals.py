"""When requests come: Poisson, gamma, and rates that rise during the run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

STRATEGIES = ("linear", "exponential")


@dataclass(frozen=True)
class Ramp:
    """The rate of the n-th of N requests goes from `start` to `end`, as `vllm bench serve --ramp-up-strategy`."""

    strategy: str
    start: float
    end: float

    def rates(self, count: int) -> np.ndarray:
        progress = np.arange(count) / max(1, count - 1)
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * progress
        return self.start * (self.end / self.start) ** progress


def arrival_times(
    count: int, rate: float, burstiness: float, seed: int | str, ramp: Ramp | None = None
) -> np.ndarray:
    """Seconds of `count` arrivals at `rate` a second, gaps gamma distributed: burstiness 1 is Poisson, less: burstier.
    An infinite rate: all at once.  `ramp` takes the place of `rate`."""
    if ramp is None and math.isinf(rate):
        return np.zeros(count)
    rates = np.full(count, rate) if ramp is None else ramp.rates(count)
    random = np.random.default_rng(seed if isinstance(seed, int) else list(seed.encode()))
    gaps = random.gamma(burstiness, 1 / (rates * burstiness), count)
    return np.cumsum(gaps) - gaps[0]
