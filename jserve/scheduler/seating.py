"""How a sequence gets its slot and its blocks, and gives them back: what `Scheduler` decides is done here.

A sequence enters through the prefix cache, as a fork of a sibling whose blocks hold the prompt, or from host memory.
Knows no queue and no budget.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from jserve.kv import BlockManager
from jserve.kv.swap import SwappedBlocks, SwappedRow
from jserve.scheduler.beam_seating import BeamSeating
from jserve.scheduler.fork_group import ForkGroup, search_of
from jserve.scheduler.sequence import Sequence
from jserve.scheduler.slots import Slots


STEP_TOKENS = 3
"""What a sequence alone in a pool grows by, at worst, before blocks behind its window are back: the token in flight,
the next one, and the one by which giving back lags behind."""


@dataclass(eq=False)
class Away:
    """Sequences whose KV was moved to host memory together; together they come back."""

    rows: dict[Sequence, SwappedRow]
    """Those that have not ended, in the order in which they left."""
    blocks: SwappedBlocks


class Seating:
    """Invariant: a sequence has blocks exactly while it is in a slot, and host blocks exactly while it is away."""

    def __init__(self, slots: Slots, blocks: BlockManager, clock: Callable[[], float]):
        self._slots = slots
        self._blocks = blocks
        self._clock = clock
        self._carried: dict[ForkGroup, None] = {}  # groups with a carrier, as an ordered set
        self.beams = BeamSeating(slots, blocks)
        self._away: dict[Away, None] = {}
        self._returned: list[SwappedBlocks] = []  # whose loads run with the plan that is being made

    def fits(self, sequence: Sequence) -> bool:
        """Whether what it knows, with its beams, can be held by the pool at all."""
        if search_of(sequence) is not None:
            return self._blocks.fits_blocks(self.beams.num_needed(sequence.group), len(sequence.group.live))
        return self._blocks.fits(sequence.num_known, STEP_TOKENS)

    def party(self, sequence: Sequence) -> list[Sequence]:
        """Those who enter together with a waiting sequence, itself included."""
        if search_of(sequence) is not None:
            return sequence.group.unfinished()
        return [sequence] if sequence.away is None else list(sequence.away.rows)

    def can_enter(self, sequence: Sequence) -> bool:
        """Head-room of a block for each running sequence: otherwise a newcomer would be preempted a moment later."""
        headroom = self._slots.num_running
        if search_of(sequence) is not None:
            return self._can_enter_beams(sequence.group, headroom)
        if sequence.away is not None:
            rows = sequence.away.rows
            fits = self._blocks.has_room(self._num_needed(sequence.away), len(rows), headroom)
            if fits or headroom:
                return fits and len(sequence.away.rows) <= self._slots.num_free
            self._forget(sequence.away)  # alone, and yet too large: they come back one by one
        if self._slots.num_free == 0:
            return False
        if self._parent_of(sequence) is not None:
            size = self._blocks.block_size
            num_new = -(-sequence.num_known // size) - _num_shared(sequence) // size
            return self._blocks.has_room(num_new, 1, headroom)
        tokens = sequence.tokens[: sequence.num_known]
        return self._blocks.can_admit(
            tokens, salt=sequence.salt, use_cache=sequence.use_prefix_cache, headroom=headroom
        )

    def enter(self, party: list[Sequence]) -> None:
        """Gives a whole party slots, and blocks for all that they know; `can_enter` said that there are."""
        group, away = party[0].group, _away(party)
        if away is not None:
            present, slots = list(away.rows), self._return(away)
        else:
            present = group.live[:1] if search_of(party[0]) is not None else party
            slots = [self._enter_one(one) for one in present]
        for slot, one in zip(slots, present):
            grown = self._blocks.reserve(slot, one.num_known)
            assert grown, "can_enter() promised the blocks"
            num_computed = self._blocks.num_computed(slot)
            if one.num_cached is None:
                one.num_cached = num_computed
                one.first_scheduled = self._clock()
            self._slots.seat(slot, one, num_computed)
            carries = group is not None and group.search is None and num_computed < _num_shared(one)
            if carries and group.carrier is None:
                group.carrier = one
                self._carried[group] = None
        if search_of(party[0]) is not None:
            self.beams.reserve(group, present)

    def leave(self, sequence: Sequence) -> list[Sequence]:
        """Gives back slot and blocks.  Returns the siblings that were parked for it."""
        if self._blocks.holds(sequence.slot):
            self._blocks.free(sequence.slot)
        return self._vacate(sequence)

    def swap_out(self, unit: list[Sequence]) -> list[Sequence] | None:
        """Moves running sequences to host memory.  Returns the siblings that were parked for one of them; None, and
        nothing has changed, where there is no room."""
        present = [one for one in unit if self._blocks.holds(one.slot)]
        swapped = self._blocks.swap_out([one.slot for one in present]) if present else None
        if swapped is None:
            return None
        away = Away(dict(zip(present, swapped.rows)), swapped)
        self._away[away] = None
        for one in present:
            one.away = away
        return [parked for one in unit for parked in self._vacate(one)]

    def forget(self, sequence: Sequence) -> None:
        """A waiting sequence ends: what it has in host memory goes with the last of those who share it."""
        away = sequence.away
        if away is not None:
            del away.rows[sequence]
            sequence.away = None
            if not away.rows:
                self._forget(away)

    def forget_all_away(self) -> None:
        """What is in host memory cannot be trusted any more: its sequences are recomputed."""
        for away in list(self._away):
            self._forget(away)

    def release_returned(self) -> None:
        """The loads of the last plan have been started: their host blocks are free."""
        for swapped in self._returned:
            self._blocks.release_swapped(swapped)
        self._returned.clear()

    def take_carried(self) -> list[Sequence]:
        """Members that were parked until their group's prompt was computed, now that it is."""
        if not self._carried:
            return []
        return [one for group in list(self._carried) if self._has_prompt(group.carrier) for one in self._uncarry(group)]

    # -- ways in and out

    def _enter_one(self, sequence: Sequence) -> int:
        parent = self._parent_of(sequence)
        slot = self._slots.take()
        if parent is not None:
            self._blocks.fork(parent.slot, slot, _num_shared(sequence))
            return slot
        tokens = sequence.tokens[: sequence.num_known]
        self._blocks.admit(slot, tokens, salt=sequence.salt, use_cache=sequence.use_prefix_cache)
        return slot

    def _return(self, away: Away) -> list[int]:
        slots = [self._slots.take() for _ in away.rows]
        fits = self._blocks.swap_in(slots, dataclasses.replace(away.blocks, rows=tuple(away.rows.values())))
        assert fits, "can_enter() promised the blocks"
        self._returned.append(away.blocks)
        del self._away[away]
        for one in away.rows:
            one.away = None
        return slots

    def _vacate(self, sequence: Sequence) -> list[Sequence]:
        self._slots.leave(sequence)
        group = sequence.group
        if search_of(sequence) is not None:
            self.beams.leave(group)
        return self._uncarry(group) if group is not None and group.carrier is sequence else []

    def _forget(self, away: Away) -> None:
        del self._away[away]
        self._blocks.release_swapped(away.blocks)
        for one in away.rows:
            one.away = None
            one.has_fetched = False
            if search_of(one) is not None:
                one.group.search.forget_reports()

    def _num_needed(self, away: Away) -> int:
        """Blocks that coming back takes, at most: the saved ones, and what each sequence has learnt since."""
        size = self._blocks.block_size
        grows = sum(
            max(0, -(-one.num_known // size) - row.num_blocks) + (row.shared_last >= 0) for one, row in away.rows.items()
        )
        return away.blocks.num_host_blocks + grows

    def _can_enter_beams(self, group: ForkGroup, headroom: int) -> bool:
        """Beams enter all at once, and each will need a block more before long."""
        party = group.unfinished()
        if len(party) > self._slots.num_free:
            return False
        away, size = _away(party), self._blocks.block_size
        if away is None:
            needed = self.beams.num_needed(group)
        else:
            absent = [one for one in group.live if one not in away.rows]
            needed = self._num_needed(away) + sum(-(-one.num_known // size) for one in absent)
        if headroom:
            return self._blocks.has_room(needed, len(party), headroom + len(party))
        if away is not None and not self._blocks.has_room(needed, len(party)):
            self._forget(away)
        return True

    # -- siblings

    def _uncarry(self, group: ForkGroup) -> list[Sequence]:
        del self._carried[group]
        group.carrier = None
        parked, group.parked = group.parked, []
        return parked

    def _parent_of(self, sequence: Sequence) -> Sequence | None:
        """A running sibling to fork, where that saves more than the prefix cache does."""
        if sequence.group is None or sequence.group.search is not None or _num_shared(sequence) == 0:
            return None
        parent = next((one for one in sequence.group.running() if self._can_be_forked(one)), None)
        if parent is None or sequence.num_output == 0 or not sequence.use_prefix_cache:
            return parent
        num_found = self._blocks.match(sequence.tokens[: sequence.num_known], sequence.salt)
        return parent if num_found < _num_shared(sequence) else None

    def _can_be_forked(self, sequence: Sequence) -> bool:
        """Its windows may have moved on from the prompt: then its siblings go through the prefix cache."""
        return self._has_prompt(sequence) and self._blocks.can_fork(sequence.slot, _num_shared(sequence))

    def _has_prompt(self, sequence: Sequence) -> bool:
        return self._blocks.num_computed(sequence.slot) >= _num_shared(sequence)


def _away(party: list[Sequence]) -> Away | None:
    return next((one.away for one in party if one.away is not None), None)


def _num_shared(sequence: Sequence) -> int:
    """Tokens that siblings share: each computes the last token of the prompt itself and draws its own first token."""
    return sequence.num_prompt - 1
