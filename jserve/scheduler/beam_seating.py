"""Where the beams of a request lie: all in slots at once, each sharing the blocks of what it has in common with others.

A step of the search moves beams: who goes on in two ways is forked, who does not go on leaves its slot in reserve.
`Seating` calls it for groups of beams; what goes on is the search's decision.
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf

import numpy as np

from jserve.kv import BlockManager
from jserve.sampling.beam_search import Move
from jserve.scheduler.fork_group import ForkGroup
from jserve.scheduler.sequence import Sequence
from jserve.scheduler.slots import Slots


class BeamSeating:
    """Invariant: a member has blocks exactly while it is in a slot, live, and not in `forks`."""

    def __init__(self, slots: Slots, blocks: BlockManager):
        self._slots = slots
        self._blocks = blocks
        self._with_forks: dict[ForkGroup, None] = {}

    def num_needed(self, group: ForkGroup) -> int:
        """Blocks that its beams need when nothing of them is there: what two of them share counts once."""
        size = self._blocks.block_size
        links = _links(group.live, [])
        return sum(-(-one.num_known // size) - links.get(one, (None, 0))[1] // size for one in group.live)

    def reserve(self, group: ForkGroup, present: ListOf[Sequence]) -> None:
        """The group has come in with the KV of `present`: slots for the others, and the forks that are still to do."""
        for one in group.unfinished():
            if one not in present:
                slot = self._slots.take()
                self._slots.seat(slot, one, 0)
                self._slots.set_tokens(slot, 0, 0)
        group.forks = _links(group.live, present)
        if group.forks:
            self._with_forks[group] = None
            for one in self.forks_to_do():
                if one.group is group:
                    self.fork(one)

    def leave(self, group: ForkGroup) -> None:
        """Its forks are not to be done any more."""
        group.forks.clear()
        self._with_forks.pop(group, None)

    def forks_to_do(self) -> list[Sequence]:
        """Members whose sibling has computed what they share with it."""
        return [
            one
            for group in self._with_forks
            for one, (parent, num_shared) in group.forks.items()
            if parent not in group.forks and self._blocks.num_computed(parent.slot) >= num_shared
        ]

    def fork(self, one: Sequence) -> bool:
        """Makes a fork that is to do; False where blocks are missing."""
        group = one.group
        parent, num_shared = group.forks[one]
        size = self._blocks.block_size
        can_fork = self._blocks.can_fork(parent.slot, num_shared)
        num_new = -(-one.num_known // size) - (num_shared // size if can_fork else 0)
        fits = self._blocks.has_windows and self._blocks.has_room(num_new)  # a window group needs fewer
        if num_new > self._blocks.num_available_blocks and not fits:
            return False
        if can_fork:
            self._blocks.fork(parent.slot, one.slot, num_shared)
        else:  # its parent's window has moved on
            known = one.tokens[: one.num_known]
            num_shared = self._blocks.admit(one.slot, known, salt=one.salt, use_cache=one.use_prefix_cache)
        grown = self._blocks.reserve(one.slot, one.num_known)
        assert grown, "there were enough blocks"
        self._slots.set_tokens(one.slot, one.num_known, num_shared)
        del group.forks[one]
        if not group.forks:
            del self._with_forks[group]
        return True

    def move(self, group: ForkGroup, moves: ListOf[Move]) -> None:
        """Makes the beams of the next step.  The first that continues a beam stays in its slot, others are forked."""
        old = group.live
        heirs: dict[int, int] = {}  # beam -> the move that stays in its slot
        for number, move in enumerate(moves):
            heirs.setdefault(move.parent, number)
        ended = [one for number, one in enumerate(old) if number not in heirs]
        for one in ended:
            self._blocks.free(one.slot)
            self._slots.set_tokens(one.slot, 0, 0)
        spare = [one for one in group.members if one not in old] + ended
        live = []
        for number, move in enumerate(moves):
            parent = old[move.parent]
            if heirs[move.parent] == number:
                live.append(parent)
                continue
            child = spare.pop()
            child.tokens[: parent.num_known] = parent.tokens[: parent.num_known]
            child.num_known = parent.num_known
            self._blocks.fork(parent.slot, child.slot, self._blocks.num_computed(parent.slot))
            live.append(child)
        for one, move in zip(live, moves):
            one.tokens[one.num_known] = move.token_id
            one.num_known += 1
            self._slots.set_tokens(one.slot, one.num_known, one.num_known - 1)
        group.live = live


def _links(live: ListOf[Sequence], present: ListOf[Sequence]) -> dict[Sequence, tuple[Sequence, int]]:
    """For each beam but the first and those present: the beam before it, or present, with which it shares the longest
    beginning, and how long that is."""
    links = {}
    for number, one in enumerate(live):
        others = [*live[:number], *(other for other in live[number + 1 :] if other in present)]
        if one not in present and others:
            links[one] = max(((other, _num_shared(one, other)) for other in others), key=lambda link: link[1])
    return links


def _num_shared(one: Sequence, other: Sequence) -> int:
    """Tokens of `one` that `other` has computed, or will have: all but the last, whose logits `one` wants itself."""
    count = min(one.num_known, other.num_known) - 1
    differs = np.flatnonzero(one.tokens[:count] != other.tokens[:count])
    return int(differs[0]) if len(differs) else count
