"""Who waits until what the tiers of the prefix cache know of its prompt is back on the device; others go on meanwhile.

A sequence fetches once before it enters, and then takes what it finds. Copies to the device are part of steps, a few in
each where others run, so that nobody's step grows long by them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from jserve.kv.fetches import Fetch
from jserve.kv.tiers import Tiers
from jserve.scheduler.sequence import Sequence

LOADS_PER_STEP = 16
"""Blocks that come back in a step that serves others too."""
MOST_WAIT_S = 10.0
"""For a disk that does not answer; then the rest of the prefix is computed."""


class TierWaits:
    """Invariant: who waits here has a fetch that goes on."""

    def __init__(self, tiers: Tiers, most: int, clock: Callable[[], float]):
        """most: sequences that may wait at once."""
        self._tiers = tiers
        self._most = most
        self._clock = clock
        self._fetches: dict[Sequence, tuple[Fetch, float]] = {}
        self._budget = 0

    def __len__(self) -> int:
        return len(self._fetches)

    def start_step(self, others_run: bool) -> list[Sequence]:
        """Copies of this step; returns those who need not wait any more."""
        self._tiers.poll()
        self._budget = LOADS_PER_STEP if others_run else sys.maxsize
        return [one for one in list(self._fetches) if not self._goes_on(one)]

    def waits(self, sequence: Sequence) -> bool:
        """Whether a sequence that could enter had better wait; if so it waits here, until `start_step` returns it.
        Else it has fetched what it can."""
        if sequence in self._fetches:
            return True
        may_fetch = sequence.use_prefix_cache and sequence.away is None and len(self._fetches) < self._most
        fetch = None
        if may_fetch:
            fetch = self._tiers.begin_fetch(sequence.tokens[: sequence.num_known], sequence.salt)
        if fetch is None:
            sequence.has_fetched = True
            return False
        self._fetches[sequence] = fetch, self._clock()
        return self._goes_on(sequence)

    def forget(self, sequence: Sequence) -> bool:
        """A sequence ends; says whether it waited here."""
        fetch, _ = self._fetches.pop(sequence, (None, 0.0))
        if fetch is not None:
            self._tiers.end_fetch(fetch)
        return fetch is not None

    def _goes_on(self, sequence: Sequence) -> bool:
        fetch, began = self._fetches[sequence]
        num_loaded = self._tiers.num_loads_due
        is_done = self._tiers.advance_fetch(fetch, self._budget)
        self._budget -= self._tiers.num_loads_due - num_loaded
        if is_done or (self._tiers.has_disk and self._clock() - began > MOST_WAIT_S):
            self.forget(sequence)
            sequence.has_fetched = True
            return False
        return True
