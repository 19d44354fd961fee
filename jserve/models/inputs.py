"""What every family's `forward` takes besides weights: the step's arrays, and how attention is to be done."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from jserve.models.config import LayerGroup, ModelConfig
from pallas_kernels.paged_attention import AttentionSpec, PoolLayout, RaggedBatch


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ForwardInputs:
    """One step: all granted tokens end to end, padded to the bucket."""

    token_ids: jax.Array  # i32[T], each below vocab_size
    positions: jax.Array  # i32[T], absolute position in the sequence
    batches: tuple[RaggedBatch, ...]  # one per layer group


@dataclass(frozen=True)
class AttentionPlan:
    """Static: which kernel serves which pool."""

    implementation: str
    layouts: tuple[PoolLayout, ...]
    """One per layer group."""
    decode_only: bool = False
    """The step's promise that flat token s is row s (AttentionSpec.decode_only)."""
    row_tile: int | None = None
    """Rows that matrix products take at a time (models.row_tiles); None: all."""

    @property
    def platform(self) -> str:
        return self.layouts[0].platform


def attention_spec(config: ModelConfig, group: LayerGroup, decode_only: bool = False) -> AttentionSpec:
    """What attention must do for one layer group of the model; `pallas_kernels.paged_attention.choose` takes it too."""
    return AttentionSpec(
        scale=config.head_dim**-0.5 if config.query_scale is None else config.query_scale,
        sliding_window=group.sliding_window,
        soft_cap=config.attention_soft_cap,
        decode_only=decode_only,
    )
