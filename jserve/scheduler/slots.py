"""The running sequences as numpy structure-of-arrays by slot: a step of many decodes is a handful of vector operations."""

from __future__ import annotations

import numpy as np

from jserve.scheduler.fork_group import search_of
from jserve.scheduler.sequence import Sequence, SequenceState


class Slots:
    """Invariants: a slot belongs to exactly one running sequence; `num_tokens` counts every token that is sure to exist,
    also one that is still being sampled."""

    def __init__(self, num_slots: int):
        self.owner: list[Sequence | None] = [None] * num_slots
        self.tokens: list[np.ndarray | None] = [None] * num_slots  # of the owner
        self.num_tokens = np.zeros(num_slots, np.int32)
        self.num_computed = np.zeros(num_slots, np.int32)
        self.epoch = np.zeros(num_slots, np.int32)  # counts occupants, so that late results find only their own
        self.num_prompt = np.zeros(num_slots, np.int32)
        self.limit = np.zeros(num_slots, np.int32)
        self.fed = np.zeros(num_slots, bool)  # the slot has sampled: its next single token stands on the device
        self.prompt_only = np.zeros(num_slots, bool)
        self.is_beam = np.zeros(num_slots, bool)  # its next token is chosen on the host
        self._rank = np.full(num_slots, np.inf)  # inf: the slot is free
        self._arrival = np.zeros(num_slots, np.int64)
        self._free = list(range(num_slots - 1, -1, -1))
        self._order = np.zeros(0, np.int32)
        self._order_is_stale = False

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_running(self) -> int:
        return len(self.owner) - len(self._free)

    def take(self) -> int:
        """A free slot, for `seat`."""
        return self._free.pop()

    def seat(self, slot: int, sequence: Sequence, num_computed: int) -> None:
        """The sequence runs in a slot that was taken, its first `num_computed` tokens found in the cache."""
        sequence.slot = slot
        sequence.state = SequenceState.RUNNING
        self.owner[slot] = sequence
        self.tokens[slot] = sequence.tokens
        self.num_tokens[slot] = sequence.num_known
        self.num_computed[slot] = num_computed
        self.num_prompt[slot] = sequence.num_prompt
        self.limit[slot] = sequence.limit
        self.prompt_only[slot] = sequence.prompt_only
        self.is_beam[slot] = search_of(sequence) is not None
        self.fed[slot] = False
        self._rank[slot], self._arrival[slot] = sequence.rank, sequence.order
        self._order_is_stale = True

    def set_tokens(self, slot: int, num_tokens: int, num_computed: int) -> None:
        """What its owner knows and has computed, otherwise than by a step; 0 and 0: a slot in reserve, which never runs."""
        self.num_tokens[slot] = num_tokens
        self.num_computed[slot] = num_computed

    def set_known(self, slot: int, num_tokens: int, is_last: bool) -> None:
        """What its owner's tokens are up to there is known on the host; `is_last`: it ends with them."""
        self.num_tokens[slot] = num_tokens
        self.fed[slot] = False
        if is_last:
            self.limit[slot] = num_tokens

    def leave(self, sequence: Sequence) -> None:
        slot = sequence.slot
        self.owner[slot] = self.tokens[slot] = None
        self._rank[slot] = np.inf
        self.epoch[slot] += 1
        self._free.append(slot)
        sequence.slot = None
        self._order_is_stale = True

    def runs(self, slots: np.ndarray) -> np.ndarray:
        """bool[n]: whether each slot has an owner that may compute more than it has."""
        return (self._rank[slots] < np.inf) & ((self.num_tokens[slots] < self.limit[slots]) | self.prompt_only[slots])

    def may_go_on(self, slot: int) -> bool:
        """`runs` of one slot."""
        return bool(self.runs(np.array([slot]))[0])

    def generating_first(self, slots: np.ndarray) -> np.ndarray:
        """The same slots, in front those whose prompt is computed: somebody reads along with them."""
        return slots[np.argsort(self.num_computed[slots] < self.num_prompt[slots], kind="stable")]

    def order(self) -> np.ndarray:
        """Slots of running sequences by (rank, order): the last one is the first to be preempted."""
        if self._order_is_stale:
            running = np.flatnonzero(self._rank < np.inf)
            self._order = running[np.lexsort((self._arrival[running], self._rank[running]))].astype(np.int32)
            self._order_is_stale = False
        return self._order

    def runnable(self) -> tuple[np.ndarray, np.ndarray]:
        """(slots with one token to compute, slots with more), in order."""
        order = self.order()
        todo = self.num_tokens[order] - self.num_computed[order]
        runs = (todo > 0) & self.runs(order)
        return order[runs & (todo == 1)], order[runs & (todo > 1)]

    def num_unfinished_tokens(self) -> int:
        """Tokens that prefill has yet to compute."""
        return int(np.maximum(self.num_tokens - self.num_computed - 1, 0)[self._rank < np.inf].sum())
