"""The scheduler: one `schedule()` a step decides which tokens of which sequences are computed.

Decodes come first, then prefill chunks fill the token budget, then waiting sequences enter in the order of the policy
(strictly: a large prompt at the head of the queue is never overtaken, so it cannot starve; running decodes go on
meanwhile).  When blocks run out, the sequence of the highest rank is preempted, with its siblings: dropped and recomputed
later, or moved to host memory.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jserve.clock import stamp
from jserve.kv import BlockManager
from jserve.request import FinishReason
from jserve.sampling.beam_search import Move
from jserve.scheduler.fork_group import ForkGroup, search_of
from jserve.scheduler.limits import SchedulerLimits
from jserve.scheduler.plan import StepPlan
from jserve.scheduler.policies import PolicySettings, make_policy
from jserve.scheduler.preemption import PreemptionSettings
from jserve.scheduler.seating import STEP_TOKENS, Seating
from jserve.scheduler.sequence import Sequence, SequenceState
from jserve.scheduler.shared_prefix import SharedPrefixes
from jserve.scheduler.slots import Slots
from jserve.scheduler.step_rows import fill_bucket, make_plan
from jserve.scheduler.step_time import StepTimeModel
from jserve.scheduler.tier_waits import TierWaits
from jserve.scheduler.waiting import WaitingQueue


_LAG = 1
"""Tokens by which giving back lags behind a window, so that siblings can fork who has just computed their prompt."""


class Scheduler:
    """Owns the queue, the slots and the block manager.

    Invariants: no step exceeds the token budget; while anything can run, a step makes progress.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        blocks: BlockManager,
        clock: Callable[[], float] = stamp,
        policy: PolicySettings = PolicySettings(),
        preemption: PreemptionSettings = PreemptionSettings(),
    ):
        self.limits = limits
        self.policy = policy
        self.preemption = preemption
        self.blocks = blocks
        blocks.expect_steps(2 * limits.max_num_batched_tokens + STEP_TOKENS)  # one step may be in flight
        self._slots = Slots(limits.num_slots)
        self._seating = Seating(self._slots, blocks, clock)
        self._policy = make_policy(policy)
        self._waiting = WaitingQueue(self._policy, self._num_matched)
        self.step_time = StepTimeModel(fits=policy.target_tbt_s is not None)
        self.prefixes = SharedPrefixes(blocks, limits.step_cost_tokens, limits.num_slots)
        self.tiers = None if blocks.tiers is None else TierWaits(blocks.tiers, limits.num_slots, clock)
        self._num_parked = 0
        self._arrivals = 0
        self._step_id = 0
        self._outgrown: list[Sequence] = []
        self._admitted: list[Sequence] = []  # entered since the last plan
        self.num_preemptions = 0
        self.num_swap_preemptions = 0
        self.num_preempted_tokens = 0
        self.num_saved_blocks = self.num_loaded_blocks = 0
        """Blocks moved to and from host memory, those of the prefix cache's host tier included."""
        self.poisons_freed = False
        """Plans have freed blocks overwritten."""

    # -- arrivals and departures

    def add(self, sequence: Sequence, sibling: Sequence | None = None) -> None:
        """Queues a sequence that `fits()`; with a sibling, as one more of the same request, whose prompt they share."""
        if sequence.search is not None:
            ForkGroup(sequence.search).join(sequence)
        if sibling is not None:
            if sibling.group is None:
                ForkGroup().join(sibling)
            sibling.group.join(sequence)
        sequence.order = self._arrivals
        self._arrivals += 1
        self._waiting.push(sequence)

    def fits(self, num_prompt: int) -> bool:
        """Whether a sequence of that many tokens can ever be held by the pool."""
        return self.blocks.fits(num_prompt, STEP_TOKENS)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a waiting or running sequence and releases what it holds.  Ending it twice is a no-op."""
        if sequence.finished:
            return
        if sequence.state is SequenceState.RUNNING:
            self._leave_slot(sequence)
        else:
            self._seating.forget(sequence)
            if sequence.group is not None and sequence in sequence.group.parked:
                sequence.group.parked.remove(sequence)
                self._num_parked -= 1
            elif self.prefixes.forget(sequence) or self._ends_fetch(sequence):
                self._num_parked -= 1
            else:
                self._waiting.remove(sequence)
        self._policy.ended(sequence)
        self.prefixes.ended(sequence)
        sequence.state = SequenceState.FINISHED
        sequence.finish_reason = reason

    def forget_device(self) -> None:
        """Device and host memory lost what they held, and everything that ran has ended."""
        self.blocks.forget_device()
        self._seating.release_returned()
        self._seating.forget_all_away()

    @property
    def num_running(self) -> int:
        return self._slots.num_running

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + self._num_parked

    @property
    def has_work(self) -> bool:
        return self.num_waiting > 0 or self.num_running > 0

    @property
    def awaits_tier(self) -> bool:
        """Whether somebody waits for a copy that is part of no step: then there may be work and nothing to plan."""
        return bool(self.tiers)

    def running(self) -> list[Sequence]:
        """Running sequences, who keeps its blocks longest first."""
        return [self._slots.owner[slot] for slot in self._slots.order()]

    def waiting(self) -> list[Sequence]:
        """Waiting sequences by rank."""
        return self._waiting.ordered()

    def first_token_s(self, num_prompt: int) -> float | None:
        """Seconds until a prompt that came now would have its first token, everything before it computed first; None
        while the speed is unknown.  May be asked by another thread."""
        ahead = self._waiting.num_tokens + self._slots.num_unfinished_tokens()
        return self.step_time.first_token_s(num_prompt + ahead)

    # -- one step

    def schedule(self) -> StepPlan | None:
        """Plans the next step, or None when nothing can run now (then only results in flight can change that)."""
        self._seating.release_returned()
        if self.tiers is not None:
            self._unpark([one for one in self.tiers.start_step(self.num_running > 0) if one.group is None])
        may_retry = True
        while True:
            num_admitted, num_outgrown = len(self._admitted), len(self._outgrown)
            self._unpark(self.prefixes.take_ready())
            plan = self._fill_step()
            has_ended = len(self._outgrown) > num_outgrown
            if plan is not None or not (has_ended or (may_retry and len(self._admitted) > num_admitted)):
                return plan
            # Whoever entered found no block for its next token, where windows give blocks only step by step.  Now that
            # it runs, somebody yields to it, or it ends because the pool is its limit; who waited for it goes on then.
            may_retry = has_ended  # once is enough where results in flight may still give blocks back

    def take_outgrown(self) -> list[Sequence]:
        """Sequences that `schedule()` ended because they outgrew the pool while alone in it."""
        outgrown, self._outgrown = self._outgrown, []
        return outgrown

    def jump(self, plan: StepPlan, forced: dict[int, list[int]]) -> None:
        """A plan that was just launched samples ids that are known, and so are some that follow (StepOutput.forced): the
        next step computes all of them as a chunk.  Their sequences hear of them with the results."""
        for place, token_ids in forced.items():
            row = int(plan.sampling_rows[place])
            slot, sequence = int(plan.slots[row]), plan.sequences[row]
            first = sequence.num_prompt + int(plan.output_index[row])
            end = first + len(token_ids)
            sequence.tokens[first:end] = token_ids
            self._slots.set_known(slot, end, is_last=token_ids[-1] in sequence.stop_ids)

    def applied(self, plan: StepPlan, device_seconds: float = 0.0) -> None:
        """The plan's results are on the host: its full blocks become findable by other sequences."""
        self.step_time.observe(plan, device_seconds)
        self.blocks.saves_arrived(plan.saves)
        live = self._slots.epoch[plan.slots] == plan.epochs
        slots = plan.slots[live]
        num_computed = (plan.first_positions + plan.num_scheduled)[live]
        self.blocks.commit_each(slots, self._slots.tokens, num_computed)
        if self.blocks.has_windows:
            self.blocks.release_behind_window(slots, num_computed - _LAG)
        self._unpark(self._seating.take_carried())

    def is_current(self, plan: StepPlan, row: int) -> bool:
        """Whether a row's sequence is still in the slot that it had."""
        return bool(self._slots.epoch[plan.slots[row]] == plan.epochs[row])

    def move_beams(self, group: ForkGroup, moves: list[Move]) -> None:
        """The search has chosen the beams of the next step."""
        self._seating.beams.move(group, moves)

    # -- phases of schedule(), in their order

    def _fill_step(self) -> StepPlan | None:
        """Who runs goes on, who waits enters."""
        if self._policy.preempts:
            self._make_room_for_urgent()
        self._fork_beams()
        decodes, prefills = self._slots.runnable()
        decodes = self._grow_decodes(decodes)
        prefills = self._slots.generating_first(prefills)
        budget = self._token_budget(decodes, prefills) - len(decodes)
        chunks: list[tuple[int, int]] = []  # (slot, tokens granted)
        for slot in prefills:
            if budget == 0:
                break
            if self._slots.owner[slot] is None:
                continue  # preempted a moment ago
            if grant := self._grant(int(slot), budget):
                chunks.append((int(slot), grant))
                budget -= grant
        if len(prefills):  # they may have preempted any of them
            decodes = decodes[self._slots.runs(decodes)]
            chunks = [chunk for chunk in chunks if self._slots.owner[chunk[0]] is not None]
        while budget > 0 and self._slots.num_free and (party := self._next_admissible()):
            self._seating.enter(party)
            self._admitted += party
            self.prefixes.entered(party[0])
            for slot in (one.slot for one in party):
                if grant := self._grant(slot, budget, may_preempt=False):
                    chunks.append((slot, grant))
                    budget -= grant
        return self._make_plan(decodes, fill_bucket(self.limits, len(decodes), chunks))

    def _make_room_for_urgent(self) -> None:
        """Preempts running sequences of a lower class where the head of the queue can enter in no other way."""
        head = self._head()
        if head is None or any(one.awaits_token for one in self._seating.party(head)):
            return
        victims = [one for one in reversed(self.running()) if one.priority > head.priority and one.rank > head.rank]
        if not victims:
            return
        needed = self.blocks.num_wanted(head.num_known) + self.num_running
        held = sum(self.blocks.num_wanted(int(self._slots.num_computed[one.slot])) for one in victims)
        if needed > self.blocks.num_available_blocks + held:
            return  # it would not enter all the same
        for victim in victims:
            if self._seating.can_enter(head):
                return
            if victim.state is SequenceState.RUNNING:
                self._preempt(victim)

    def _token_budget(self, decodes: np.ndarray, prefills: np.ndarray) -> int:
        """Tokens of this step: what is allowed, or what keeps the target gap of the decodes."""
        target = self.policy.target_tbt_s
        most = self.limits.max_num_batched_tokens
        if target is None or len(decodes) == 0:
            return most
        past = int(self._slots.num_computed[prefills[0]]) if len(prefills) else 0
        context = int(self._slots.num_tokens[decodes].sum())
        return min(
            most, self.step_time.bucket_within(target, self.limits.token_buckets, len(decodes), context, past)
        )

    def _grow_decodes(self, decodes: np.ndarray) -> np.ndarray:
        """Gives every decode room for its token, preempting from the tail of the running order where blocks run out."""
        while True:
            num_grown = self.blocks.grow_each(decodes, self._slots.num_computed[decodes] + 1)
            if num_grown == len(decodes):
                return decodes
            if self._awaits_blocks():
                return decodes[:num_grown]
            self._free_some_blocks()
            decodes = decodes[self._slots.runs(decodes)]

    def _grant(self, slot: int, budget: int, may_preempt: bool = True) -> int:
        """Tokens of a chunk for this step.  Blocks for what it knew it got when it entered; for what was forced since, and
        where windows give blocks back as it goes on, it gets them now.  Where they run out less is granted, or somebody
        preempted."""
        slots = self._slots
        wanted = max(0, min(budget, int(slots.num_tokens[slot] - slots.num_computed[slot])))
        owner, num_computed = slots.owner[slot], int(slots.num_computed[slot])
        if wanted == 0 or (not self.blocks.has_windows and self.blocks.grow(slot, num_computed + wanted)):
            return wanted
        while slots.owner[slot] is owner and slots.may_go_on(slot):
            grant = min(wanted, self.blocks.num_growable(slot) - num_computed)
            if grant > 0:
                grown = self.blocks.grow(slot, num_computed + grant)
                assert grown, "num_growable() said so"
                return grant
            if not may_preempt or self._awaits_blocks():
                return 0
            self._free_some_blocks()
        return 0

    def _awaits_blocks(self) -> bool:
        """Whether results in flight will give back blocks behind somebody's window."""
        order = self._slots.order()
        return self.blocks.has_windows and self.blocks.awaits_release(order, self._slots.num_computed[order], _LAG)

    def _fork_beams(self) -> None:
        """Beams that came back without their KV share that of a sibling, as soon as it is there."""
        for one in self._seating.beams.forks_to_do():
            while one in one.group.forks and not self._seating.beams.fork(one):
                if self._awaits_blocks():
                    return
                self._free_some_blocks()

    def _free_some_blocks(self) -> None:
        """Takes the blocks of the last in the running order; nobody is before it, the pool is its limit."""
        last = self._slots.owner[int(self._slots.order()[-1])]
        if self.num_running == 1 or (search_of(last) is not None and len(self._unit(last)) == self.num_running):
            self._end_outgrown(last)
        else:
            self._preempt(last)

    def _end_outgrown(self, sequence: Sequence) -> None:
        """The pool is full and the sequence alone in it: what it has, and what is being sampled, is all it gets."""
        slots = self._slots
        if search_of(sequence) is None and sequence.num_known < slots.num_tokens[sequence.slot]:  # the next id is still being sampled
            sequence.limit = int(slots.num_tokens[sequence.slot])  # the token in flight ends it with LENGTH
            slots.limit[sequence.slot] = sequence.limit
        else:
            self._end_with_length(sequence)

    def _end_with_length(self, sequence: Sequence) -> None:
        """Ends a sequence, or all its beams as they are, with no results in flight that could end it."""
        if (search := search_of(sequence)) is not None:
            search.cut()
        for one in [sequence] if search is None else sequence.group.unfinished():
            self.finish(one, FinishReason.LENGTH)
        self._outgrown.append(sequence if search is None else sequence.group.members[0])

    def _head(self) -> Sequence | None:
        """Who enters next.  Those whose prompt, or much of it, somebody is computing are parked on the way."""
        while not self.prefixes.is_full and (sequence := self._waiting.head()) is not None:
            group = sequence.group
            if group is not None and group.carrier is not None:
                group.parked.append(sequence)
            elif not self.prefixes.waits(sequence):
                return sequence
            self._waiting.remove(sequence)
            self._num_parked += 1
        return None

    def _next_admissible(self) -> list[Sequence]:
        """Who enters now: one, or several that come back from host memory together; taken from the queue."""
        sequence = self._head()
        if sequence is None:
            return []
        if not self._seating.fits(sequence):  # preempted when it held the whole pool
            self._end_with_length(sequence)
            return self._next_admissible()
        if any(one.awaits_token for one in self._seating.party(sequence)):
            return []  # preempted while its next id is being sampled: that id comes with the next results
        if not self._seating.can_enter(sequence):
            return []
        if self.tiers is not None and not sequence.has_fetched:
            if self.tiers.waits(sequence):
                if sequence.group is not None:
                    return []  # siblings hold the queue up: set aside, the next of them would be the head
                self._waiting.remove(sequence)
                self._num_parked += 1
            return self._next_admissible()
        party = self._seating.party(sequence)
        self._waiting.pop()
        for one in party:
            if one is not sequence:
                self._waiting.take(one)
        return party

    def _make_plan(self, decodes: np.ndarray, chunks: list[tuple[int, int]]) -> StepPlan | None:
        if len(decodes) == 0 and not chunks:
            return None
        self._step_id += 1
        admitted = [one for one in dict.fromkeys(self._admitted) if one.slot is not None]
        self._admitted.clear()
        saves, copies, loads = self.blocks.take_saves(), self.blocks.take_copies(), self.blocks.take_loads()
        self.num_saved_blocks += len(saves)
        self.num_loaded_blocks += len(loads)
        return make_plan(
            self._slots, self.limits, decodes, chunks, step_id=self._step_id, admitted=admitted, saves=saves,
            copies=copies, loads=loads, poisoned=self.blocks.take_newly_unused() if self.poisons_freed else [],
        )

    # -- slots and queue

    def _ends_fetch(self, sequence: Sequence) -> bool:
        """A waiting sequence ends; says whether it was set aside for the tiers."""
        return self.tiers is not None and self.tiers.forget(sequence) and sequence.group is None

    def _num_matched(self, sequence: Sequence) -> int:
        """Tokens that the prefix cache holds of a waiting sequence."""
        if not sequence.use_prefix_cache:
            return 0
        return self.blocks.match(sequence.tokens[: sequence.num_known], sequence.salt)

    def _leave_slot(self, sequence: Sequence) -> None:
        self._unpark(self._seating.leave(sequence))

    def _unpark(self, sequences: list[Sequence]) -> None:
        self._num_parked -= len(sequences)
        for sequence in sequences:
            self._waiting.put_back(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Takes a sequence and its running siblings off the device; alone there, the siblings stay."""
        unit = self._unit(sequence)
        if len(unit) == self.num_running and search_of(sequence) is None:
            unit = [sequence]  # as one they would come back as they were and run out of blocks again
        for one in unit:
            one.awaits_token = self._is_being_sampled(one)
        num_computed = self._slots.num_computed[[one.slot for one in unit]]
        parked = self._swap_out(unit, num_computed)
        if parked is None:
            self.num_preempted_tokens += int(num_computed.sum())
            if (search := search_of(sequence)) is not None:
                search.forget_reports()
            for one in unit:
                self._leave_slot(one)
        else:
            self.num_swap_preemptions += len(unit)
            self._unpark(parked)
        self.num_preemptions += len(unit)
        for one in unit:  # they wait, with a rank no worse than before
            one.num_preemptions += 1
            one.has_fetched = False
            one.state = SequenceState.WAITING
            self._waiting.push(one)

    def _unit(self, sequence: Sequence) -> list[Sequence]:
        """A running sequence and its running siblings, in their order."""
        return [sequence] if sequence.group is None else sequence.group.running()

    def _is_being_sampled(self, sequence: Sequence) -> bool:
        """Whether the results in flight have its next token, or the candidates for it."""
        slot, search = sequence.slot, search_of(sequence)
        if search is None:
            return bool(self._slots.num_tokens[slot] > sequence.num_known)
        is_computed = self._slots.num_tokens[slot] == self._slots.num_computed[slot] > 0
        return bool(is_computed and not search.has_report(sequence.group.live.index(sequence)))

    def _swap_out(self, unit: list[Sequence], num_computed: np.ndarray) -> list[Sequence] | None:
        """Moves them to host memory, where that is preferred and possible; else None."""
        num_shared = max(0, np.count_nonzero(num_computed) - 1) * (unit[0].num_prompt - 1)
        num_to_recompute = max(1, int(num_computed.sum()) - num_shared)
        num_blocks = -(-num_to_recompute // self.blocks.block_size)
        if not self.preemption.prefers_swap(num_to_recompute, num_blocks, self.step_time):
            return None
        return self._seating.swap_out(unit)
