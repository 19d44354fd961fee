"""What came before, for comparison: static batches, rows preallocated to the longest, whole prefills ahead of decodes.

Each is given what flatters it: no padding to buckets, no host time, and the token of a request's last prefill step at
once.  Requests are kept in numpy arrays by row.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from jserve.simulator.steps import Outcome, SimStep
from jserve.simulator.workload import SimRequest


class StaticBatching:
    """A batch runs until its longest output is done; prompts are padded to the longest of the batch.  The rows are
    preallocated, and finished ones go on computing."""

    name = "static"
    depth = 0

    def __init__(self, num_rows: int, max_context: int):
        self.num_rows, self._max_context = num_rows, max_context
        self._waiting: deque[SimRequest] = deque()
        self._batch: list[SimRequest] = []
        self._num_done = 0  # steps of the batch

    def add(self, request: SimRequest) -> bool:
        if request.total > self._max_context or self.num_rows < 1:
            return False
        self._waiting.append(request)
        return True

    def schedule(self, now: float) -> SimStep | None:
        if not self._batch:
            count = min(self.num_rows, len(self._waiting))
            self._batch = [self._waiting.popleft() for _ in range(count)]
            self._num_done = 0
        if not self._batch:
            return None
        longest = max(request.prompt for request in self._batch)
        rows, numbers = np.arange(len(self._batch)), [request.number for request in self._batch]
        if self._num_done == 0:
            granted = np.array([request.prompt for request in self._batch])
            return SimStep(rows, numbers, granted, np.zeros(len(rows), int), longest * len(rows))
        running = np.array([request.output > self._num_done for request in self._batch])
        past = np.full(len(rows), longest + self._num_done - 1)
        return SimStep(rows, numbers, running.astype(int), past, len(rows))

    def apply(self, step: SimStep, now: float, seconds: float) -> Outcome:
        self._num_done += 1
        done = self._num_done
        emitted = [request.number for request in self._batch if request.output >= done]
        if all(request.output <= done for request in self._batch):
            ended = [request.number for request in self._batch]
            self._batch = []
            return Outcome(emitted, ended)
        return Outcome(emitted, [])

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._batch)


class WholePrefill:
    """Continuous batching without chunks: a prompt is computed in one step.

    mix: prompts join the decodes of their step (Orca); else they have a step of their own, ahead of decodes (vLLM
    before chunked prefill).  block_size = max_context is preallocation: a sequence owns one block, the longest length.
    """

    depth = 0

    def __init__(
        self, name: str, *, num_rows: int, num_blocks: int, block_size: int, max_context: int, budget: int, mix: bool
    ):
        self.name, self.num_rows = name, num_rows
        self._num_free, self._num_blocks, self._block_size = num_blocks, num_blocks, block_size
        self._max_context, self._budget, self._mix = max_context, budget, mix
        self._waiting: deque[tuple[SimRequest, int]] = deque()  # request, tokens it has produced
        self._request: list[SimRequest | None] = [None] * num_rows
        self._known = np.zeros(num_rows, int)  # tokens of the row's sequence
        self._computed = np.zeros(num_rows, int)
        self._held = np.zeros(num_rows, int)  # blocks
        self._order = np.zeros(num_rows, int)
        self._left = np.zeros(num_rows, int)  # outputs to come
        self._entered = 0
        self.num_preemptions = 0

    def add(self, request: SimRequest) -> bool:
        if request.total > self._max_context or self._blocks_of(request.total) > self._num_blocks:
            return False
        self._waiting.append((request, 0))
        return True

    def schedule(self, now: float) -> SimStep | None:
        decoding = self._live()
        entering = self._admit()
        if len(entering) and not self._mix:
            rows = entering
        else:
            rows = np.concatenate([self._grow(decoding), entering]).astype(int)
        if len(rows) == 0:
            return None
        granted, past = self._known[rows] - self._computed[rows], self._computed[rows].copy()
        return SimStep(rows, [self._request[row].number for row in rows], granted, past, int(granted.sum()))

    def apply(self, step: SimStep, now: float, seconds: float) -> Outcome:
        rows = step.rows
        self._computed[rows] = self._known[rows]
        self._known[rows] += 1
        self._left[rows] -= 1
        ended = [number for number, row in zip(step.numbers, rows) if self._left[row] == 0]
        for row in rows[self._left[rows] == 0].tolist():
            self._leave(row)
        return Outcome(step.numbers, ended)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or len(self._live()) > 0

    def _live(self) -> np.ndarray:
        return np.array([row for row, request in enumerate(self._request) if request is not None], int)

    def _admit(self) -> np.ndarray:
        """Waiting requests enter free rows while blocks last; at least one prompt, more while they fit the budget."""
        entered: list[int] = []
        tokens = 0
        free_rows = [row for row, request in enumerate(self._request) if request is None]
        while self._waiting and free_rows:
            request, produced = self._waiting[0]
            num_known = request.prompt + produced
            needed = self._blocks_of(num_known + 1)
            if needed > self._num_free or (entered and tokens + num_known > self._budget):
                break
            self._waiting.popleft()
            row = free_rows.pop(0)
            self._request[row], self._known[row], self._computed[row] = request, num_known, 0
            self._left[row] = request.output - produced
            self._held[row], self._order[row] = needed, self._entered
            self._num_free -= needed
            self._entered += 1
            tokens += num_known
            entered.append(row)
        return np.array(entered, int)

    def _grow(self, rows: np.ndarray) -> np.ndarray:
        """A block more where a sequence needs one; where there is none the latest arrival is dropped and recomputed."""
        for row in rows[np.argsort(self._order[rows])].tolist():
            if self._request[row] is None:
                continue
            while self._blocks_of(int(self._known[row])) > self._held[row]:
                if self._num_free:
                    self._held[row] += 1
                    self._num_free -= 1
                    continue
                live = [other for other in rows.tolist() if self._request[other] is not None]
                victim = max(live, key=lambda other: self._order[other])
                self.num_preemptions += 1
                request = self._request[victim]
                self._waiting.appendleft((request, request.output - int(self._left[victim])))
                self._leave(victim)
                if victim == row:
                    break
        return np.array([row for row in rows.tolist() if self._request[row] is not None], int)

    def _leave(self, row: int) -> None:
        self._num_free += int(self._held[row])
        self._request[row] = None

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
