"""The compile plan: the finite list of programs that serving needs, computed from the config before anything is compiled.

A forward program per token bucket (mixed steps) and per sequence bucket (every row one token); an LM head per sequence
bucket; a sampler per row bucket and variant; a scorer for prompt log-probabilities.  Forward, head and sampler are
separate, so variants do not multiply buckets.
"""

from __future__ import annotations

from dataclasses import dataclass

from jserve.config import Config, ConfigError
from jserve.sampling.sampler import VARIANTS, SamplerVariant
from jserve.scheduler.buckets import default_sequence_buckets, default_token_buckets

SCORED_ROWS = 64
"""Prompt positions that one scorer call handles: bounds the logits of prompt_logprobs to SCORED_ROWS x vocabulary."""


@dataclass(frozen=True)
class StepShape:
    """Static shape of a forward program."""

    num_tokens: int
    num_rows: int
    decode_only: bool

    def __str__(self) -> str:
        return f"decode[{self.num_rows}]" if self.decode_only else f"mixed[{self.num_tokens} tokens, {self.num_rows} rows]"


@dataclass(frozen=True)
class SamplerShape:
    """Static shape of a sampler program."""

    num_rows: int
    variant: SamplerVariant

    def __str__(self) -> str:
        return f"{self.variant.kind.value}[{self.num_rows} rows{', logprobs' if self.variant.logprobs else ''}]"


@dataclass(frozen=True)
class CompilePlan:
    token_buckets: tuple[int, ...]
    sequence_buckets: tuple[int, ...]
    num_slots: int

    @property
    def mixed_shapes(self) -> tuple[StepShape, ...]:
        return tuple(StepShape(size, min(size, self.num_slots), False) for size in self.token_buckets)

    @property
    def decode_shapes(self) -> tuple[StepShape, ...]:
        return tuple(StepShape(size, size, True) for size in self.sequence_buckets)

    @property
    def step_shapes(self) -> tuple[StepShape, ...]:
        return self.decode_shapes + self.mixed_shapes

    @property
    def sampler_shapes(self) -> tuple[SamplerShape, ...]:
        return tuple(SamplerShape(rows, variant) for variant in VARIANTS for rows in self.sampler_rows)

    @property
    def head_rows(self) -> tuple[int, ...]:
        """Row buckets of the LM head, the costly part of sampling."""
        return self.sequence_buckets

    @property
    def sampler_rows(self) -> tuple[int, ...]:
        """Row buckets of the samplers: two, because a sampler compiles for seconds and runs for little of a step."""
        return tuple(sorted({min(size, self.num_slots) for size in (8, self.num_slots)}))

    def __str__(self) -> str:
        return (
            f"{len(self.step_shapes)} forward programs (decode rows {_listed(self.sequence_buckets)}; mixed tokens "
            f"{_listed(self.token_buckets)}), {len(self.head_rows)} heads, {len(self.sampler_shapes)} samplers, 1 prompt scorer"
        )


def make_compile_plan(config: Config) -> CompilePlan:
    """The plan of a config whose automatic values are resolved.

    Raises:
      ConfigError: buckets that exceed or miss the limits.
    """
    scheduler = config.scheduler
    budget = scheduler.max_num_batched_tokens
    num_slots = min(scheduler.max_num_seqs, budget)
    return CompilePlan(
        token_buckets=_checked(
            "compile.token_buckets", config.compile.token_buckets, default_token_buckets(budget)
        ),
        sequence_buckets=_checked(
            "compile.sequence_buckets", config.compile.sequence_buckets, default_sequence_buckets(num_slots)
        ),
        num_slots=num_slots,
    )


def _checked(key: str, buckets: tuple[int, ...] | None, default: tuple[int, ...]) -> tuple[int, ...]:
    if buckets is None:
        return default
    largest = default[-1]
    for size in buckets:
        if not 1 <= size <= largest:
            raise ConfigError(f"{key} = {list(buckets)}: {size} is not between 1 and {largest}")
    return tuple(sorted({*buckets, largest}))  # the largest step must have a program


def _listed(sizes: tuple[int, ...]) -> str:
    return " ".join(str(size) for size in sizes)
