"""The waiting queue: a heap by rank, which a policy gives.  Constant in its length but for the heap's logarithm."""

from __future__ import annotations

import heapq
import math

from jserve.scheduler.policies import Match, Policy
from jserve.scheduler.sequence import Sequence


class WaitingQueue:
    """Invariant: every sequence in the queue has one entry with its ticket; other entries are skipped when they come up."""

    def __init__(self, policy: Policy, match: Match):
        self._policy = policy
        self._match = match
        self._heap: list[tuple[float, int, int, Sequence]] = []
        self._count = 0
        self.num_tokens = 0
        """Known tokens of all waiting sequences: what they need computed, at most."""

    def __len__(self) -> int:
        return self._count

    def push(self, sequence: Sequence) -> None:
        """A sequence starts to wait."""
        sequence.rank = self._policy.rank(sequence)
        self.put_back(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """A sequence that was removed waits again, with the rank it had."""
        sequence.ticket += 1
        heapq.heappush(self._heap, (sequence.rank, sequence.order, sequence.ticket, sequence))
        self._count += 1
        sequence.queued_tokens = sequence.num_known
        self.num_tokens += sequence.queued_tokens

    def head(self) -> Sequence | None:
        """Who enters next."""
        self._skip_removed()
        if self._policy.window > 1 and self._count > 1:
            self._choose()
        return self._heap[0][3] if self._heap else None

    def pop(self) -> Sequence:
        """Takes the head, as `head` returned it last."""
        sequence = heapq.heappop(self._heap)[3]
        self.take(sequence)
        return sequence

    def take(self, sequence: Sequence) -> None:
        """A sequence that enters together with the head."""
        self._policy.entered(sequence)
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It no longer waits here; its entry is skipped later."""
        sequence.ticket += 1
        self._count -= 1
        self.num_tokens -= sequence.queued_tokens

    def ordered(self) -> list[Sequence]:
        return [one for _, _, ticket, one in sorted(self._heap) if ticket == one.ticket]

    def _skip_removed(self) -> None:
        while self._heap and self._heap[0][2] != self._heap[0][3].ticket:
            heapq.heappop(self._heap)

    def _choose(self) -> None:
        """Puts the best of the window, by its rank of now, at the head; the others keep the rank they had."""
        window: list[Sequence] = []
        while self._heap and len(window) < self._policy.window:
            window.append(heapq.heappop(self._heap)[3])
            self._skip_removed()
        best = min(window, key=lambda one: (self._policy.now(one, self._match), one.order))
        for one in window:
            heapq.heappush(self._heap, (-math.inf if one is best else one.rank, one.order, one.ticket, one))
