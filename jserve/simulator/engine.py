"""Our system: the real scheduler, block manager and outputs over the stand-in runner."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jserve.engine.outputs import apply
from jserve.kv import BlockManager, GroupSpec
from jserve.request import Sampling
from jserve.runner.fake_runner import FakeRunner
from jserve.scheduler import PolicySettings, Scheduler, SchedulerLimits, Sequence
from jserve.scheduler.buckets import default_sequence_buckets, default_token_buckets
from jserve.simulator.steps import Outcome, SimStep
from jserve.simulator.workload import SimRequest


@dataclass(frozen=True)
class EngineSettings:
    """What `serve` would be told."""

    num_blocks: int
    """The dead block included."""
    block_size: int
    max_context: int
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    token_buckets: tuple[int, ...] | None = None
    """None: powers of two."""
    sequence_buckets: tuple[int, ...] | None = None
    prefix_cache: bool = True
    overlap: bool = True
    step_cost_tokens: int = 32
    """What a step costs beyond its tokens, in tokens: where reading the weights bounds it, those that come for free."""
    policy: PolicySettings = PolicySettings()


class EngineSystem:
    """`schedule`, `launch` and `apply` as the engine loop calls them."""

    name = "jserve"

    def __init__(self, settings: EngineSettings):
        self.settings = settings
        self.num_rows = min(settings.max_num_seqs, settings.max_num_batched_tokens)
        self.depth = 1 if settings.overlap else 0
        blocks = BlockManager(
            groups=[GroupSpec()],
            num_blocks=[settings.num_blocks],
            block_size=settings.block_size,
            num_slots=self.num_rows,
            max_blocks_per_seq=-(-settings.max_context // settings.block_size),
            prefix_cache=settings.prefix_cache,
        )
        self.scheduler = make_scheduler(settings, blocks, lambda: self._now)
        self.runner = FakeRunner(self.num_rows)
        self._now = 0.0
        self._sampling: dict[int, Sampling] = {}

    def add(self, request: SimRequest) -> bool:
        if request.total > self.settings.max_context or not self.scheduler.fits(request.prompt):
            return False
        tokens = np.zeros(request.prompt, np.int32)
        tokens[: request.shared] = -1 - request.group
        tokens[min(request.shared, request.prompt - 1)] = request.number + 1
        self.scheduler.add(
            Sequence(
                str(request.number), tokens, self._sampling_of(request.output), priority=request.priority,
                arrival=request.arrival, use_prefix_cache=self.settings.prefix_cache, context=request.number,
                tenant=request.tenant,
            )
        )
        return True

    def schedule(self, now: float) -> SimStep | None:
        self._now = now
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        self.runner.launch(plan)
        numbers = [sequence.context for sequence in plan.sequences]
        return SimStep(plan.slots, numbers, plan.num_scheduled, plan.first_positions, plan.bucket, plan)

    def apply(self, step: SimStep, now: float, seconds: float) -> Outcome:
        output = self.runner.collect()
        output.device_seconds = seconds
        result = apply(self.scheduler, step.about, output)
        ended = result.ended + [(sequence, None) for sequence in self.scheduler.take_outgrown()]
        return Outcome([one.context for one in result.sequences], [one.context for one, _ in ended])

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def _sampling_of(self, max_tokens: int) -> Sampling:
        if max_tokens not in self._sampling:
            self._sampling[max_tokens] = Sampling(
                temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, max_tokens=max_tokens, min_tokens=0, stop=(),
                stop_token_ids=frozenset(), eos_token_ids=frozenset(), banned_below_min_tokens=(),
                include_stop_str_in_output=False, skip_special_tokens=True, logprobs=None, prompt_logprobs=None,
            )
        return self._sampling[max_tokens]


def make_scheduler(settings: EngineSettings, blocks: BlockManager, clock) -> Scheduler:
    budget = settings.max_num_batched_tokens
    num_slots = min(settings.max_num_seqs, budget)
    limits = SchedulerLimits(
        max_num_batched_tokens=budget,
        max_num_seqs=settings.max_num_seqs,
        token_buckets=settings.token_buckets or default_token_buckets(budget),
        sequence_buckets=settings.sequence_buckets or default_sequence_buckets(num_slots),
        step_cost_tokens=settings.step_cost_tokens,
    )
    return Scheduler(limits, blocks, clock, settings.policy)
