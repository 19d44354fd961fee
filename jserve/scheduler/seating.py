"""How a sequence gets its slot and its blocks, and gives them back: what `Scheduler` decides is done here.

A sequence enters through the prefix cache, or as a fork of a sibling whose blocks hold the prompt.  Knows no queue and no
budget.
"""

from __future__ import annotations

from collections.abc import Callable

from jserve.kv import BlockManager
from jserve.scheduler.fork_group import ForkGroup
from jserve.scheduler.sequence import Sequence
from jserve.scheduler.slots import Slots


class Seating:
    """Invariant: a sequence has blocks exactly while it is in a slot."""

    def __init__(self, slots: Slots, blocks: BlockManager, clock: Callable[[], float]):
        self._slots = slots
        self._blocks = blocks
        self._clock = clock
        self._carried: dict[ForkGroup, None] = {}  # groups with a carrier, as an ordered set

    def can_enter(self, sequence: Sequence) -> bool:
        """Head-room of a block for each running sequence: otherwise a newcomer would be preempted a moment later."""
        if self._slots.num_free == 0:
            return False
        headroom = self._slots.num_running
        if self._parent_of(sequence) is not None:
            size = self._blocks.block_size
            num_new = -(-sequence.num_known // size) - _num_shared(sequence) // size
            return num_new <= self._blocks.num_available_blocks - headroom
        tokens = sequence.tokens[: sequence.num_known]
        return self._blocks.can_admit(
            tokens, salt=sequence.salt, use_cache=sequence.use_prefix_cache, headroom=headroom
        )

    def enter(self, sequence: Sequence) -> int:
        """Its slot, with blocks for all that it knows; `can_enter` said that there are."""
        parent = self._parent_of(sequence)
        slot = self._slots.take()
        if parent is not None:
            num_computed = _num_shared(sequence)
            self._blocks.fork(parent.slot, slot, num_computed)
        else:
            tokens = sequence.tokens[: sequence.num_known]
            num_computed = self._blocks.admit(slot, tokens, salt=sequence.salt, use_cache=sequence.use_prefix_cache)
            if sequence.group is not None and num_computed < _num_shared(sequence):
                sequence.group.carrier = sequence
                self._carried[sequence.group] = None
        grown = self._blocks.grow(slot, sequence.num_known)
        assert grown, "can_enter() promised the blocks"
        if sequence.num_cached is None:
            sequence.num_cached = num_computed
            sequence.first_scheduled = self._clock()
        self._slots.seat(slot, sequence, num_computed)
        return slot

    def leave(self, sequence: Sequence) -> list[Sequence]:
        """Gives back slot and blocks.  Returns the siblings that were parked for it."""
        self._blocks.free(sequence.slot)
        self._slots.leave(sequence)
        group = sequence.group
        return self._uncarry(group) if group is not None and group.carrier is sequence else []

    def take_carried(self) -> list[Sequence]:
        """Members that were parked until their group's prompt was computed, now that it is."""
        if not self._carried:
            return []
        return [one for group in list(self._carried) if self._has_prompt(group.carrier) for one in self._uncarry(group)]

    def _uncarry(self, group: ForkGroup) -> list[Sequence]:
        del self._carried[group]
        group.carrier = None
        parked, group.parked = group.parked, []
        return parked

    def _parent_of(self, sequence: Sequence) -> Sequence | None:
        """A running sibling to fork, where that saves more than the prefix cache does."""
        if sequence.group is None or _num_shared(sequence) == 0:
            return None
        parent = next((one for one in sequence.group.running() if self._has_prompt(one)), None)
        if parent is None or sequence.num_output == 0 or not sequence.use_prefix_cache:
            return parent
        num_found = self._blocks.match(sequence.tokens[: sequence.num_known], sequence.salt)
        return parent if num_found < _num_shared(sequence) else None

    def _has_prompt(self, sequence: Sequence) -> bool:
        return self._blocks.num_computed(sequence.slot) >= _num_shared(sequence)


def _num_shared(sequence: Sequence) -> int:
    """Tokens that siblings share: each computes the last token of the prompt itself and draws its own first token."""
    return sequence.num_prompt - 1
