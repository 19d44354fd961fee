"""A stand-in for the device: no JAX, next tokens one can compute by hand, step time from a function.

Behaves like the real runner at its seam, one thing above all: the id that a slot sampled last lives in the "device",
and rows that feed from it never see it on the host.  Tests, the simulator and host benchmarks drive the real scheduler
and block manager with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from jserve.scheduler.plan import StepOutput, StepPlan


def next_token(token_id: int, position: int, vocab_size: int, index: int = 0) -> int:
    """The id that follows `token_id` at absolute `position` in sample `index`: depends on all, so a wrong one shows.

    >>> next_token(7, 3, 1000)
    257
    """
    return (token_id * 31 + position * 13 + index * 7 + 1) % vocab_size


class FakeRunner:
    """Runs plans in order; `step_seconds(plan)` is added to `clock_s`, a simulated device clock, and reported.

    Attributes:
      clock_s: seconds of simulated device time so far.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int = 1000,
        step_seconds: Callable[[StepPlan], float] | None = None,
    ):
        self._slot_token = np.zeros(num_slots, np.int64)
        self._slot_index = np.zeros(num_slots, np.int64)
        self._vocab_size = vocab_size
        self._step_seconds = step_seconds
        self._done: deque[StepOutput] = deque()
        self.clock_s = 0.0

    def launch(self, plan: StepPlan) -> None:
        for sequence in plan.admitted:
            self._slot_index[sequence.slot] = sequence.index
        last_positions = plan.first_positions + plan.num_scheduled - 1
        rows = plan.sampling_rows
        slots = plan.slots[rows]
        last_tokens = self._slot_token[slots]
        for at, row in enumerate(rows):
            if not plan.feeds[row]:
                last_tokens[at] = plan.sequences[row].tokens[last_positions[row]]
        sampled = (last_tokens * 31 + last_positions[rows] * 13 + self._slot_index[slots] * 7 + 1) % self._vocab_size
        self._slot_token[slots] = sampled
        seconds = self._step_seconds(plan) if self._step_seconds else 0.0
        self.clock_s += seconds
        self._done.append(StepOutput(plan.step_id, sampled.astype(np.int32), device_seconds=seconds))

    def collect(self) -> StepOutput:
        """The oldest launched step's output."""
        return self._done.popleft()
