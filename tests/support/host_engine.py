"""The real scheduler, block manager and outputs over the stand-in runner: whole runs without a model, in milliseconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence as ListOf
from dataclasses import dataclass, field

import numpy as np

from jserve.engine.outputs import apply
from jserve.kv import BlockManager, GroupSpec
from jserve.request import FinishReason, Sampling
from jserve.runner.fake_runner import FakeRunner, next_token
from jserve.sampling.beam_search import BeamSearch
from jserve.scheduler import PolicySettings, PreemptionSettings, Scheduler, SchedulerLimits, Sequence, StepPlan
from jserve.scheduler.buckets import powers_up_to
from tests.support.block_store import MemoryStore
from tests.support.jumping_runner import JumpingKvRunner, JumpingRunner
from tests.support.kv_runner import KvRunner

VOCAB_SIZE = 1000


def sampling(max_tokens: int, **changes) -> Sampling:
    """Greedy, no stop of any kind."""
    values = dict(
        temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, max_tokens=max_tokens, min_tokens=0, stop=(),
        stop_token_ids=frozenset(), eos_token_ids=frozenset(), banned_below_min_tokens=(),
        include_stop_str_in_output=False, skip_special_tokens=True, logprobs=None, prompt_logprobs=None,
    )
    return Sampling(**{**values, **changes})


def sequence(name: str, prompt: ListOf[int], max_tokens: int, *, priority: int = 0, **changes) -> Sequence:
    return Sequence(name, np.array(prompt, np.int32), sampling(max_tokens, **changes), priority=priority)


def expected_output(prompt: ListOf[int], count: int, index: int = 0) -> list[int]:
    """What the stand-in model generates after a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens[-1], len(tokens) - 1, VOCAB_SIZE, index))
    return tokens[len(prompt) :]


def group(name: str, prompt: ListOf[int], max_tokens: int, count: int, **changes) -> list[Sequence]:
    """The sequences of one request with n = count."""
    return [
        Sequence(name, np.array(prompt, np.int32), sampling(max_tokens, n=count, best_of=count, **changes), index=index)
        for index in range(count)
    ]


def beams(name: str, prompt: ListOf[int], max_tokens: int, width: int, **changes) -> list[Sequence]:
    """The beams of one request."""
    params = sampling(max_tokens, beam_width=width, n=width, best_of=width, **changes)
    return [
        Sequence(name, np.array(prompt, np.int32), params, index=index, search=BeamSearch(params) if index == 0 else None)
        for index in range(width)
    ]


@dataclass
class HostEngine:
    """Steps by hand: `step()` schedules, launches and applies as the engine loop does."""

    num_blocks: int | tuple[int, ...] = 64
    """Of each layer group."""
    windows: tuple[int | None, ...] = (None,)
    """Of each layer group."""
    max_tokens: int | None = None
    """Longest sequence; None: what the largest pool holds."""
    block_size: int = 4
    budget: int = 16
    max_num_seqs: int = 8
    overlap: bool = False
    prefix_cache: bool = True
    step_cost_tokens: int = 8
    policy: PolicySettings = PolicySettings()
    preemption: PreemptionSettings = PreemptionSettings()
    num_host_blocks: int | None = None
    host_tier: bool = False
    has_disk: bool = False
    """A tier whose transfers are done one step later."""
    checks_kv: bool = False
    """Every step reads back what attention would read."""
    jumps: bool = False
    """Some tokens are forced (JumpingRunner)."""
    store: MemoryStore | None = None
    plans: list[StepPlan] = field(default_factory=list)
    outgrown: list[Sequence] = field(default_factory=list)

    def __post_init__(self):
        num_slots = min(self.budget, self.max_num_seqs)
        if self.has_disk and self.store is None:
            self.store = MemoryStore(
                lambda transfer: self.runner.host_cells[transfer.group][transfer.host_block].copy(),
                lambda transfer, content: self.runner.host_cells[transfer.group].__setitem__(transfer.host_block, content),
            )
        num_groups = len(self.windows)
        num_blocks = (self.num_blocks,) * num_groups if isinstance(self.num_blocks, int) else self.num_blocks
        self.blocks = BlockManager(
            groups=[GroupSpec(window) for window in self.windows], num_blocks=num_blocks, block_size=self.block_size,
            num_slots=num_slots, prefix_cache=self.prefix_cache,
            max_blocks_per_seq=max(num_blocks) if self.max_tokens is None else -(-self.max_tokens // self.block_size),
            num_host_blocks=None if self.num_host_blocks is None else [self.num_host_blocks] * num_groups,
            host_tier=self.host_tier, disk=self.store,
        )
        limits = SchedulerLimits(
            self.budget, self.max_num_seqs, powers_up_to(min(4, self.budget), self.budget),
            powers_up_to(1, num_slots), self.step_cost_tokens,
        )
        self.scheduler = Scheduler(limits, self.blocks, policy=self.policy, preemption=self.preemption)
        self.runner = (
            (JumpingKvRunner if self.jumps else KvRunner)(num_slots, VOCAB_SIZE, self.blocks, self.num_host_blocks)
            if self.checks_kv
            else (JumpingRunner if self.jumps else FakeRunner)(num_slots, VOCAB_SIZE)
        )
        self.in_flight: deque[StepPlan] = deque()

    def add(self, *sequences: Sequence) -> None:
        for one in sequences:
            assert self.scheduler.fits(one.num_prompt)
            self.scheduler.add(one)

    def add_group(self, sequences: ListOf[Sequence]) -> None:
        for one in sequences:
            self.scheduler.add(one, None if one is sequences[0] else sequences[0])

    def step(self) -> StepPlan | None:
        """One turn of the loop; the plan that it launched."""
        plan = self.scheduler.schedule()
        self.outgrown += self.scheduler.take_outgrown()
        if plan is not None:
            assert plan.num_tokens <= self.budget
            self.plans.append(plan)
            self.in_flight.append(plan)
            if forced := self.runner.launch(plan):
                self.scheduler.jump(plan, forced)
        if self.in_flight and (plan is None or len(self.in_flight) > int(self.overlap)):
            apply(self.scheduler, self.in_flight.popleft(), self.runner.collect())
        elif plan is None and not self.scheduler.awaits_tier:
            assert not self.scheduler.has_work, "work waits, nothing runs, nothing is in flight"
        if self.store is not None:
            self.store.complete_all()
        assert self.blocks.check_integrity() == []
        return plan

    def run(self, sequences: Iterable[Sequence] = (), max_steps: int = 10_000) -> None:
        """Adds the sequences and steps until nothing is left."""
        self.add(*sequences)
        for _ in range(max_steps):
            if not (self.scheduler.has_work or self.in_flight):
                return
            self.step()
        raise AssertionError(f"work left after {max_steps} steps")

    def abort(self, one: Sequence) -> None:
        self.scheduler.finish(one, FinishReason.ABORTED)


def output(one: Sequence) -> list[int]:
    return one.tokens[one.num_prompt : one.num_known].tolist()
