"""The whole prediction: what fits, how fast a step can be, how a long prompt is cut, which settings to start with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jserve.config import BadUsage
from jserve.parallel import split
from jserve.planner.capacity import Memory, plan_memory
from jserve.planner.roofline import Roofline
from jserve.scheduler.buckets import default_sequence_buckets, default_token_buckets

BUDGETS = (256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Question:
    """What a person wants to know, besides model and device."""

    context: int
    """Longest sequence; what a system without paging sets aside."""
    mean_length: int = 1000
    """Tokens that a sequence has on average."""
    batches: Sequence[int] = (1, 8, 32, 128)
    block_size: int = 16
    memory_fraction: float = 0.9
    reserve_bytes: float = 2e9
    prompt: int = 32768
    decodes: int = 32
    """Sequences that decode while the prompt comes in."""
    budget: int | None = None
    """Tokens a step; None: the recommended one."""
    shared_prefix: int = 2010
    suffix: int = 200
    """A prompt of shared_prefix + suffix tokens whose first part others have too."""
    target_tbt_s: float = 0.05
    """Gap between tokens that the recommended settings keep."""


@dataclass(frozen=True)
class Step:
    """`batch` sequences that decode, each with `context` tokens."""

    batch: int
    context: int
    bytes: float
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.batch / self.seconds


@dataclass(frozen=True)
class Chunk:
    num_tokens: int
    past: int
    flops: float
    seconds: float


@dataclass(frozen=True)
class ChunkSchedule:
    """How `prompt` tokens are computed with `decodes` rows beside them."""

    prompt: int
    decodes: int
    budget: int
    counted: list[Chunk]
    """The decodes take their part of the budget, as the scheduler does."""
    whole_budget: list[Chunk]
    """The chunk gets all of the budget."""
    whole_prompt: Chunk
    """No chunks: for so long every decode waits."""


@dataclass(frozen=True)
class PrefixHit:
    """What a prompt costs whose first `shared` tokens somebody has computed."""

    prompt: int
    shared: int
    num_blocks: int
    num_hit: int

    @property
    def num_left(self) -> int:
        return self.prompt - self.num_hit


@dataclass(frozen=True)
class Recommended:
    max_num_batched_tokens: int
    max_num_seqs: int
    token_buckets: tuple[int, ...]
    sequence_buckets: tuple[int, ...]


@dataclass(frozen=True)
class Deployment:
    roofline: Roofline
    question: Question
    memory: Memory
    max_paged: int
    max_preallocated: int
    steps: list[Step]
    chunks: ChunkSchedule
    prefix: PrefixHit
    recommended: Recommended


def predict(roofline: Roofline, question: Question) -> Deployment:
    """The prediction.  ConfigError with the numbers where the model does not fit."""
    check_parallel(roofline)
    memory = plan_memory(
        roofline,
        block_size=question.block_size,
        memory_fraction=question.memory_fraction,
        reserve_bytes=question.reserve_bytes,
    )
    paged, preallocated = memory.max_paged(question.mean_length), memory.max_preallocated(question.context)
    recommended = recommend(roofline, memory, question)
    batches = sorted({*question.batches, paged, preallocated} - {0})
    prompt, size = question.shared_prefix + question.suffix, question.block_size
    num_hit = min(question.shared_prefix, prompt - 1) // size
    return Deployment(
        roofline=roofline,
        question=question,
        memory=memory,
        max_paged=paged,
        max_preallocated=preallocated,
        steps=[decode_step(roofline, batch, question.mean_length) for batch in batches],
        chunks=schedule_chunks(
            roofline, question.prompt, question.decodes, question.budget or recommended.max_num_batched_tokens
        ),
        prefix=PrefixHit(prompt, question.shared_prefix, num_hit, num_hit * size),
        recommended=recommended,
    )


def check_parallel(roofline: Roofline) -> None:
    """ConfigError where the model cannot be split over that many devices."""
    devices, model = roofline.tensor_parallel_size, roofline.model
    sizes = {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads, "d_ff": model.d_ff}
    if reason := split.why_not(devices, **sizes):
        raise BadUsage(f"tensor_parallel_size = {devices}: {model.name}: {reason}")


def decode_step(roofline: Roofline, batch: int, context: int) -> Step:
    cost = roofline.decode(batch, context)
    return Step(batch, context, cost.bytes, cost.seconds)


def schedule_chunks(roofline: Roofline, prompt: int, decodes: int, budget: int) -> ChunkSchedule:
    """The steps that a prompt takes; ConfigError where the decodes leave it nothing."""
    if decodes >= budget:
        raise BadUsage(f"{decodes} decodes leave nothing of a budget of {budget} tokens for a prompt")
    return ChunkSchedule(
        prompt, decodes, budget,
        counted=_chunks(roofline, prompt, budget - decodes),
        whole_budget=_chunks(roofline, prompt, budget),
        whole_prompt=_chunk(roofline, prompt, 0),
    )


def recommend(roofline: Roofline, memory: Memory, question: Question) -> Recommended:
    """Settings to start with: the largest budget and batch that keep the gap between tokens, at the longest context."""
    within = [
        budget
        for budget in BUDGETS
        if _chunk(roofline, budget, max(0, question.context - budget)).seconds <= question.target_tbt_s
    ]
    # A budget below the balance point reads the weights for less than they could serve.
    floor = next((budget for budget in BUDGETS if budget >= min(roofline.balanced_tokens, 512)), BUDGETS[-1])
    budget = max(within[-1] if within else floor, floor)
    num_seqs = 1
    while (
        2 * num_seqs <= min(budget, max(1, memory.max_paged(question.mean_length)))
        and roofline.decode(2 * num_seqs, question.mean_length).seconds <= question.target_tbt_s
    ):
        num_seqs *= 2
    return Recommended(budget, num_seqs, default_token_buckets(budget), default_sequence_buckets(num_seqs))


def _chunks(roofline: Roofline, prompt: int, size: int) -> list[Chunk]:
    return [_chunk(roofline, min(size, prompt - past), past) for past in range(0, prompt, size)]


def _chunk(roofline: Roofline, num_tokens: int, past: int) -> Chunk:
    cost = roofline.step(np.array([num_tokens]), np.array([past]))
    return Chunk(num_tokens, past, cost.flops, cost.seconds)
