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


def next_candidates(best: int, vocab_size: int, count: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log-probabilities of the candidates for a beam, of which `best` (its next_token) is the most probable."""
    places = np.arange(count)
    token_ids = (best + 17 * places) % vocab_size
    gaps = 0.05 + (best * 7 + places * 13) % 23 / 20
    return token_ids.astype(np.int32), (-0.3 - np.cumsum(gaps) + gaps[0]).astype(np.float32)


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
            self._slot_index[sequence.slot] = sequence.index if sequence.sampling.beam_width == 1 else 0
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
        output = StepOutput(plan.step_id, sampled.astype(np.int32), device_seconds=seconds)
        if len(plan.beams):
            beams = [next_candidates(int(sampled[at]), self._vocab_size) for at in plan.beams.tolist()]
            output.beam_ids = np.stack([token_ids for token_ids, _ in beams])
            output.beam_logprobs = np.stack([logprobs for _, logprobs in beams])
        self._done.append(output)

    def collect(self) -> StepOutput:
        """The oldest launched step's output."""
        return self._done.popleft()
