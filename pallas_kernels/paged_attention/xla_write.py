"""Writing a step's keys and values into the pool in plain XLA: decodes token by token, chunks block by block.

A scatter on CPU is a loop over its indices, several microseconds each: 512 tokens of a chunk cost more than their attention.
So the tokens of a chunk are written as runs, each the part of them that falls into one block: read the block, put the run's
slots in, write it back.  A decode's run is one token, which a scatter writes without reading its block.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.batch import AttentionSpec, RaggedBatch, TokenRows, token_rows
from pallas_kernels.paged_attention.layout import DEAD_BLOCK, PoolLayout, write_tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Runs:
    """W runs of chunk tokens, the first num_runs are real."""

    block: jax.Array  # i32[W]: physical block
    start: jax.Array  # i32[W]: flat token that slot 0 of the block would hold, plus block_size; never negative
    first: jax.Array  # i32[W]: slots first .. end - 1 are the run's own
    end: jax.Array  # i32[W]
    num_runs: jax.Array  # i32[]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Writes:
    block: jax.Array  # i32[D]: of flat tokens 0 .. D - 1; the dead block where the token is no decode's
    offset: jax.Array  # i32[D]
    runs: Runs | None  # None in a decode-only program


def plan_writes(batch: RaggedBatch, num_tokens: int, layout: PoolLayout, spec: AttentionSpec) -> Writes:
    """Where the step's tokens go; once a step."""
    tokens = token_rows(batch, num_tokens, layout.block_size, spec)
    if spec.decode_only:
        return Writes(tokens.block, tokens.offset, None)
    num_decodes = min(batch.kv_lens.shape[0], num_tokens)
    is_decode = jnp.arange(num_decodes) < batch.num_decodes
    block = jnp.where(is_decode, tokens.block[:num_decodes], DEAD_BLOCK)
    return Writes(block, tokens.offset[:num_decodes], _cut_into_runs(batch, num_tokens, layout.block_size))


def write(pool: jax.Array, layer: jax.Array | int, writes: Writes, packed_TKpL: jax.Array) -> jax.Array:
    """The pool with packed tokens [T, K, planes, lanes] in their places; in place when donated."""
    pool = write_tokens(pool, layer, writes.block, writes.offset, packed_TKpL[: writes.block.shape[0]])
    return pool if writes.runs is None else _write_runs(pool, layer, writes.runs, packed_TKpL)


def _cut_into_runs(batch: RaggedBatch, num_tokens: int, block_size: int) -> Runs:
    num_rows, max_blocks = batch.block_tables.shape
    starts, q_lens = batch.cu_q_lens[:-1], jnp.diff(batch.cu_q_lens)
    is_chunk = (jnp.arange(num_rows) >= batch.num_decodes) & (batch.kv_lens > 0) & (q_lens > 0)
    position = batch.kv_lens - q_lens  # of the row's first token
    first_block = position // block_size
    runs_of_row = jnp.where(is_chunk, (batch.kv_lens - 1) // block_size - first_block + 1, 0)
    ends = jnp.cumsum(runs_of_row)
    run = jnp.arange(num_tokens // block_size + 2 * min(num_rows, num_tokens), dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, run, side="right", method="compare_all"), num_rows - 1).astype(jnp.int32)
    index = first_block[row] + run - (ends - runs_of_row)[row]
    in_table = (index >= 0) & (index < max_blocks)
    block = jnp.where(in_table, batch.block_tables[row, jnp.where(in_table, index, 0)], DEAD_BLOCK)
    base = index * block_size
    first = jnp.maximum(position[row] - base, 0)
    end = jnp.minimum(batch.kv_lens[row] - base, block_size)
    start = starts[row] + base - position[row] + block_size
    return Runs(block, jnp.maximum(start, 0), first, end, ends[-1])


def _write_runs(pool, layer, runs: Runs, packed_TKpL):
    num_blocks, _, _, block_size, _ = pool.shape[1:]
    # Slots before and after a run's own read other tokens or this padding; both are masked.
    packed_TKpL = jnp.pad(packed_TKpL, ((block_size, block_size), (0, 0), (0, 0), (0, 0)))
    slot = jnp.arange(block_size)[:, None]

    def write_run(w, pool):
        block = jnp.where((runs.block[w] >= 0) & (runs.block[w] < num_blocks), runs.block[w], DEAD_BLOCK)
        tokens_PKpL = jax.lax.dynamic_slice_in_dim(packed_TKpL, runs.start[w], block_size)
        at = (layer, block, 0, 0, 0, 0)
        old_KpPL = jax.lax.dynamic_slice(pool, at, (1, 1, *pool.shape[2:]))
        own = (slot >= runs.first[w]) & (slot < runs.end[w])
        new_KpPL = jnp.where(own, jnp.moveaxis(tokens_PKpL, 0, 2), old_KpPL)
        return jax.lax.dynamic_update_slice(pool, new_KpPL, at)

    return jax.lax.fori_loop(0, runs.num_runs, write_run, pool)
