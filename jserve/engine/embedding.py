"""One request's embedding on the host: sums of hidden states from the chunks of its prompt."""

from __future__ import annotations

import numpy as np

from jserve.request import Pooling
from jserve.runner.pooling import first_pooled
from jserve.scheduler.plan import PooledStates


class PromptPool:
    """One f64[D], whatever the prompt's length.  Chunks come in order; after a preemption they may begin anew."""

    def __init__(self, pooling: Pooling, num_prompt: int):
        self._first = first_pooled(pooling, num_prompt)
        self._num_wanted = num_prompt - self._first
        self._sum: np.ndarray | None = None
        self._count = 0

    def add(self, states: PooledStates) -> None:
        if states.first == self._first:
            self._sum, self._count = np.zeros(len(states.total)), 0
        if states.first != self._first + self._count:
            raise RuntimeError(f"hidden states from position {states.first} came after {self._count} of them")
        self._sum += states.total
        self._count += states.count

    def mean(self) -> list[float]:
        """The embedding; RuntimeError where a chunk is missing."""
        if self._count != self._num_wanted:
            raise RuntimeError(f"hidden states of {self._count} tokens came, {self._num_wanted} were awaited")
        return (self._sum / self._count).astype(np.float32).tolist()
