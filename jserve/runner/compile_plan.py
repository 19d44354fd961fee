"""The compile plan: the finite list of programs that serving needs, computed from the config before anything is compiled.

A forward program per token bucket (mixed steps) and per sequence bucket (every row one token); an LM head per sequence
bucket; a sampler per row bucket and variant; a scorer for prompt log-probabilities.  Forward, head and sampler are
separate, so variants do not multiply buckets.
"""

from __future__ import annotations

from dataclasses import dataclass

from jserve.config import BadUsage, Config
from jserve.sampling.sampler import VARIANTS, SamplerVariant
from jserve.scheduler.buckets import default_sequence_buckets, default_token_buckets

ROW_TILE = 8
"""Rows that products take at a time where results must not depend on the step: fewer read the weights more often, more
compute padding for a lone stream."""
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
    row_tile: int | None = None
    """Set: one forward program serves every step, in tiles of so many rows; the buckets are what it then computes."""

    @property
    def mixed_shapes(self) -> tuple[StepShape, ...]:
        sizes = self.token_buckets if self.row_tile is None else self.token_buckets[-1:]
        return tuple(StepShape(size, min(size, self.num_slots), False) for size in sizes)

    @property
    def decode_shapes(self) -> tuple[StepShape, ...]:
        sizes = self.sequence_buckets if self.row_tile is None else ()
        return tuple(StepShape(size, size, True) for size in sizes)

    @property
    def step_shapes(self) -> tuple[StepShape, ...]:
        return self.decode_shapes + self.mixed_shapes

    @property
    def sampler_shapes(self) -> tuple[SamplerShape, ...]:
        return tuple(SamplerShape(rows, variant) for variant in VARIANTS for rows in self.sampler_rows)

    @property
    def head_rows(self) -> tuple[int, ...]:
        """Row buckets of the LM head, the costly part of sampling."""
        return self.sequence_buckets if self.row_tile is None else self.sampler_rows

    @property
    def sampler_rows(self) -> tuple[int, ...]:
        """Row buckets of the samplers: two, because a sampler compiles for seconds and runs for little of a step."""
        return tuple(sorted({min(size, self.num_slots) for size in (8, self.num_slots)}))

    def step_shape(self, bucket: int, decode_only: bool) -> StepShape:
        """Of the program that runs a step of that bucket."""
        if self.row_tile is not None:
            return self.mixed_shapes[-1]
        return StepShape(bucket, bucket if decode_only else min(bucket, self.num_slots), decode_only)

    def __str__(self) -> str:
        if self.row_tile is not None:
            return (
                f"deterministic: 1 forward program of {self.token_buckets[-1]} tokens in tiles of {self.row_tile}, "
                f"{len(self.head_rows)} heads, {len(self.sampler_shapes)} samplers, 1 prompt scorer"
            )
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
    if config.compile.deterministic:
        return _deterministic_plan(config, budget, num_slots)
    return CompilePlan(
        token_buckets=_checked(
            "compile.token_buckets", config.compile.token_buckets, default_token_buckets(budget)
        ),
        sequence_buckets=_checked(
            "compile.sequence_buckets", config.compile.sequence_buckets, default_sequence_buckets(num_slots)
        ),
        num_slots=num_slots,
    )


def _deterministic_plan(config: Config, budget: int, num_slots: int) -> CompilePlan:
    for key in ("token_buckets", "sequence_buckets"):
        if (value := getattr(config.compile, key)) is not None:
            raise BadUsage(f"compile.{key} = {list(value)}: with compile.deterministic one program serves every step")
    tiles = lambda size: (*range(ROW_TILE, size, ROW_TILE), -(-size // ROW_TILE) * ROW_TILE)
    return CompilePlan(tiles(budget), tiles(num_slots), num_slots, ROW_TILE)


def _checked(key: str, buckets: tuple[int, ...] | None, default: tuple[int, ...]) -> tuple[int, ...]:
    if buckets is None:
        return default
    largest = default[-1]
    for size in buckets:
        if not 1 <= size <= largest:
            raise BadUsage(f"{key} = {list(buckets)}: {size} is not between 1 and {largest}")
    return tuple(sorted({*buckets, largest}))  # the largest step must have a program


def _listed(sizes: tuple[int, ...]) -> str:
    return " ".join(str(size) for size in sizes)
