"""A step's geometry as attention sees it: which flat tokens belong to which sequence, and where its KV lies.

`RaggedBatch` is the same for every layer of a layer group; `AttentionSpec` is what is static about the layers.
`token_rows` derives what every implementation needs for the KV write.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.layout import DEAD_BLOCK


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RaggedBatch:
    """Rows are sequences, decodes first.  Their tokens of this step lie end to end on the flat token axis.

    Row s owns flat tokens `cu_q_lens[s] : cu_q_lens[s+1]`; they stand at absolute positions
    `kv_lens[s] - q_len .. kv_lens[s] - 1`.  Flat tokens from `cu_q_lens[-1]` on are padding.

    Two decodes at positions 7 and 70 and a chunk of three tokens at 0..2, in buckets of 8 tokens and 4 rows, block size 64:

        block_tables [[5, 0], [2, 9], [4, 0], [0, 0]]   kv_lens [8, 71, 3, 0]   cu_q_lens [0, 1, 2, 5, 5]   num_decodes 2
    """

    block_tables: jax.Array  # i32[S, max_blocks]: physical block ids; unused entries are 0, the dead block
    kv_lens: jax.Array  # i32[S]: tokens in the sequence's KV after this step; 0 = padding row
    cu_q_lens: jax.Array  # i32[S + 1]
    num_decodes: jax.Array  # i32[]: the first num_decodes rows have one token each, at flat tokens 0..num_decodes-1


@dataclass(frozen=True)
class AttentionSpec:
    """What is static about a layer group's attention."""

    scale: float
    """Factor on q.k, usually head_dim ** -0.5."""
    sliding_window: int | None = None
    """A token sees itself and the `sliding_window - 1` before it; None: all before it."""
    soft_cap: float | None = None
    """Logits become `soft_cap * tanh(logits / soft_cap)`, before the mask."""
    has_sinks: bool = False
    """Each q head has one more logit that takes probability and gives no value; `paged_attention(sinks=f32[N])`."""
    decode_only: bool = False
    """Static promise: T == S, flat token s is row s; kv_lens alone says which rows are live."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenRows:
    """Per flat token: its sequence, its absolute position, and the slot of the pool where its K and V go."""

    row: jax.Array  # i32[T], 0 for padding
    position: jax.Array  # i32[T], -1 for padding
    block: jax.Array  # i32[T], the dead block for padding and for positions beyond the table
    offset: jax.Array  # i32[T], row within the block


def token_rows(batch: RaggedBatch, num_tokens: int, block_size: int, spec: AttentionSpec) -> TokenRows:
    num_rows, max_blocks = batch.block_tables.shape
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    if spec.decode_only:
        if num_tokens != num_rows:
            raise ValueError(f"decode_only needs one token a row, got {num_tokens} tokens and {num_rows} rows")
        row, position = token, batch.kv_lens - 1
    else:
        ends = batch.cu_q_lens[1:]
        row = jnp.searchsorted(ends, token, side="right", method="compare_all").astype(jnp.int32)
        live = row < num_rows
        row = jnp.where(live, row, 0)
        position = jnp.where(live, batch.kv_lens[row] - ends[row] + token, -1)
    index = position // block_size
    live = (position >= 0) & (index < max_blocks)
    block = jnp.where(live, batch.block_tables[row, jnp.where(live, index, 0)], DEAD_BLOCK)
    return TokenRows(row, jnp.maximum(position, -1), block, jnp.where(live, position % block_size, 0))
