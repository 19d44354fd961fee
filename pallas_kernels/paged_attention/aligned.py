"""Paged attention in plain XLA whose result for a token has the same bits in every step.

Queries are taken in tiles that begin at absolute positions, keys too, and every product has one shape.  So a token
stands at the same place of the same tile as a decode, in a chunk of any size and beside any neighbours; key tiles that
it does not see leave its running softmax as it is, exactly.  Slower than `xla` where few tokens of a tile are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.batch import AttentionSpec, RaggedBatch, TokenRows, token_rows
from pallas_kernels.paged_attention.layout import PoolLayout, pack, read_blocks, write_tokens
from pallas_kernels.paged_attention.xla import blocks_of, heads_first, initial_state, normalised, online_softmax

QUERIES = 8
"""Queries a tile."""
KEYS = 64
"""Keys an iteration reads for each tile, in whole blocks."""
GROUP = 8
"""Tiles that are computed at a time."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """Tiles of QUERIES positions of one sequence, the longest context first; W of them, in whole groups."""

    row: jax.Array  # i32[W]: the sequence
    start: jax.Array  # i32[W]: flat token at the tile's first position; it may be another sequence's, or lie outside
    position: jax.Array  # i32[W]: the tile's first position, a multiple of QUERIES
    first: jax.Array  # i32[W]: places first .. end - 1 of the tile are tokens of this step
    end: jax.Array  # i32[W]: 0 in unused tiles
    tables: jax.Array  # i32[S, blocks]
    num_groups: jax.Array  # i32[]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metadata:
    tokens: TokenRows
    tiles: Tiles


def validate(layout: PoolLayout, spec: AttentionSpec) -> None:
    """Everything is supported; decode_only programs would be other programs, so the caller makes none."""
    if spec.decode_only:
        raise NotImplementedError("aligned: a decode-only program would round differently than a mixed one")


def prepare(batch: RaggedBatch, num_tokens: int, layout: PoolLayout, spec: AttentionSpec) -> Metadata:
    num_rows = batch.kv_lens.shape[0]
    starts, q_lens = batch.cu_q_lens[:-1], jnp.diff(batch.cu_q_lens)
    q_lens = jnp.where(batch.kv_lens > 0, q_lens, 0)
    begins = batch.kv_lens - q_lens  # position of each row's first token
    lead = begins % QUERIES
    ends = jnp.cumsum(jnp.where(q_lens > 0, (lead + q_lens + QUERIES - 1) // QUERIES, 0))
    num_tiles = num_tokens // QUERIES + 2 * min(num_rows, num_tokens)
    tile = jnp.arange(num_tiles + -num_tiles % GROUP, dtype=jnp.int32)
    row = jnp.searchsorted(ends, tile, side="right", method="compare_all").astype(jnp.int32)
    is_used = row < num_rows
    row = jnp.minimum(row, num_rows - 1)
    before = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])[row]
    offset = (tile - before) * QUERIES - lead[row]  # of the tile's first place from the row's first token
    end = jnp.where(is_used, jnp.clip(q_lens[row] - offset, 0, QUERIES), 0)
    position = begins[row] + offset
    order = jnp.argsort(-jnp.where(is_used, position + end, 0), stable=True)
    table_blocks = blocks_of(KEYS, layout)
    tables = jnp.pad(batch.block_tables, ((0, 0), (0, -batch.block_tables.shape[1] % table_blocks)))
    by_length = lambda x: x[order].astype(jnp.int32)
    tiles = Tiles(
        row=by_length(row),
        start=by_length(starts[row] + offset),
        position=by_length(position),
        first=by_length(jnp.maximum(-offset, 0)),
        end=by_length(end),
        tables=tables,
        num_groups=(ends[-1] + GROUP - 1) // GROUP,
    )
    return Metadata(token_rows(batch, num_tokens, layout.block_size, spec), tiles)


def attend(q, k, v, pool, layer, metadata: Metadata, *, layout, spec, sinks=None, k_scale=None, v_scale=None):
    tokens, tiles = metadata.tokens, metadata.tiles
    pool = write_tokens(pool, layer, tokens.block, tokens.offset, pack(k, v, layout, k_scale, v_scale))
    scale = spec.scale if k_scale is None else spec.scale * jnp.reshape(jnp.asarray(k_scale, jnp.float32), (-1, 1, 1))
    num_tokens, num_kv_heads = q.shape[0], layout.num_kv_heads
    q_TKGH = q.astype(jnp.float32).reshape(num_tokens, num_kv_heads, -1, layout.head_dim) * scale
    per_kv_head = q_TKGH.shape[2]
    sinks_KR = None if sinks is None else jnp.tile(
        sinks.astype(jnp.float32).reshape(num_kv_heads, per_kv_head), (1, QUERIES)
    )
    blocks = blocks_of(KEYS, layout)
    num_keys = blocks * layout.block_size
    window = spec.sliding_window
    place_Q = jnp.arange(QUERIES)

    def group(g, out_TKGH):
        of_group = lambda x: jax.lax.dynamic_slice_in_dim(x, g * GROUP, GROUP)
        row, start, position, first, end = map(
            of_group, (tiles.row, tiles.start, tiles.position, tiles.first, tiles.end)
        )
        flat_BQ = start[:, None] + place_Q
        q_BQKGH = q_TKGH[jnp.clip(flat_BQ, 0, num_tokens - 1)]
        q_BKRH = jnp.moveaxis(q_BQKGH, 1, 2).reshape(GROUP, num_kv_heads, QUERIES * per_kv_head, layout.head_dim)
        q_position_BR = position[:, None] + jnp.arange(QUERIES * per_kv_head) // per_kv_head
        length = jnp.where(end > 0, position + end, 0)
        lowest = jnp.zeros_like(length) if window is None else jnp.maximum(position + first - window + 1, 0)
        tables = tiles.tables[row]

        def step(i, state):
            index = (lowest // num_keys + i)[:, None] * blocks + jnp.arange(blocks)
            ids = jnp.take_along_axis(tables, jnp.minimum(index, tables.shape[1] - 1), 1)
            position_BC = (lowest // num_keys + i)[:, None] * num_keys + jnp.arange(num_keys)
            keys_BKCH, values_BKCH = heads_first(read_blocks(pool, layer, ids, layout), 2)
            used_BC = (position_BC >= lowest[:, None]) & (position_BC < length[:, None])
            visible_BRC = position_BC[:, None] <= q_position_BR[:, :, None]
            if window is not None:
                visible_BRC &= position_BC[:, None] > q_position_BR[:, :, None] - window
            return online_softmax(
                state, q_BKRH, keys_BKCH, jnp.where(used_BC[:, None, :, None], values_BKCH, 0),
                (visible_BRC & used_BC[:, None])[:, None], spec,
            )  # fmt: skip

        num_steps = jnp.max((length + num_keys - 1) // num_keys - lowest // num_keys)
        state = jax.lax.fori_loop(0, num_steps, step, initial_state(q_BKRH, sinks_KR))
        new_BQKGH = jnp.moveaxis(normalised(state).reshape(GROUP, num_kv_heads, QUERIES, per_kv_head, -1), 2, 1)
        is_own = (place_Q >= first[:, None]) & (place_Q < end[:, None])
        return out_TKGH.at[jnp.where(is_own, flat_BQ, num_tokens)].set(new_BQKGH, mode="drop")

    out_TKGH = jax.lax.fori_loop(0, tiles.num_groups, group, jnp.zeros_like(q_TKGH))
    if v_scale is not None:
        out_TKGH *= jnp.reshape(jnp.asarray(v_scale, jnp.float32), (-1, 1, 1))
    return out_TKGH.reshape(q.shape).astype(q.dtype), pool
