"""Paged attention in plain XLA: the CPU path, and the fallback of the other platforms.

Decode rows are sorted by length and taken in groups; each group loops over its own keys.  Chunk rows are cut into tiles of
queries of one sequence; each tile loops over its own causal (and window) key range.  Both loops have dynamic trip counts, so
cost follows the live tokens and not the buckets, and both are an online softmax in float32 over several blocks at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.batch import AttentionSpec, RaggedBatch
from pallas_kernels.paged_attention.layout import DEAD_BLOCK, PoolLayout, pack, read_blocks
from pallas_kernels.paged_attention.tuned import tuned
from pallas_kernels.paged_attention.xla_write import Writes, plan_writes, write

_MASKED = -1e30  # finite, so that a tile without any visible key gives exp(0) and later a factor 0, never inf - inf


@dataclass(frozen=True)
class Tiles:
    """Sizes of the loops, chosen by tools/bench_cpu_attention.py."""

    decode_rows: int = 16
    """Decode rows a group: their keys and values of one iteration should stay in a core's L2."""
    decode_keys: int = 32
    """Keys an iteration of the decode loop reads for each row, in whole blocks."""
    chunk_rows: int = 64
    """Queries a tile; times q heads a kv head it is the rows of the matrix product."""
    chunk_keys: int = 64
    """Keys an iteration of the chunk loop reads, in whole blocks."""


TILES = Tiles()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeGroups:
    """Decode rows, longest first, padded to whole groups; D rows in all."""

    order: jax.Array  # i32[D]: the row (and flat token) at each place
    place: jax.Array  # i32[rows]: the place of each row
    lens: jax.Array  # i32[D]: kv_lens, 0 for rows that are not decodes
    tables: jax.Array  # i32[D, blocks]
    num_groups: jax.Array  # i32[]: groups with at least one live row


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChunkTiles:
    """Tiles of at most `chunk_rows` flat tokens of one sequence; W of them, the first num_tiles are real."""

    row: jax.Array  # i32[W]: the sequence
    start: jax.Array  # i32[W]: flat token of the tile's first row, moved down where the tile would end beyond the axis
    position: jax.Array  # i32[W]: absolute position of the tile's first row
    first: jax.Array  # i32[W]: rows first .. first + count - 1 are the tile's own
    count: jax.Array  # i32[W]
    tables: jax.Array  # i32[S, blocks]
    num_tiles: jax.Array  # i32[]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metadata:
    writes: Writes
    decodes: DecodeGroups
    chunks: ChunkTiles | None  # None in a decode-only program


def validate(layout: PoolLayout, spec: AttentionSpec) -> None:
    """Everything is supported."""


def prepare(
    batch: RaggedBatch, num_tokens: int, layout: PoolLayout, spec: AttentionSpec, tiles: Tiles | None = None
) -> Metadata:
    writes = plan_writes(batch, num_tokens, layout, spec)
    tiles = tiles or tuned(TILES, "xla", layout)
    decodes = _group_decodes(batch, num_tokens, layout, spec, tiles)
    chunks = None if spec.decode_only else _tile_chunks(batch, num_tokens, layout, tiles)
    return Metadata(writes, decodes, chunks)


def attend(
    q, k, v, pool, layer, metadata: Metadata, *, layout, spec, sinks=None, k_scale=None, v_scale=None, tiles=None
):
    tiles = tiles or tuned(TILES, "xla", layout)
    pool = write(pool, layer, metadata.writes, pack(k, v, layout, k_scale, v_scale))
    scale = spec.scale if k_scale is None else spec.scale * jnp.reshape(jnp.asarray(k_scale, jnp.float32), (-1, 1, 1))
    q_TKGH = q.astype(jnp.float32).reshape(q.shape[0], layout.num_kv_heads, -1, layout.head_dim) * scale
    sinks_KG = None if sinks is None else sinks.astype(jnp.float32).reshape(q_TKGH.shape[1:3])
    out_TKGH = _attend_decodes(q_TKGH, pool, layer, metadata.decodes, layout, spec, sinks_KG, tiles)
    if metadata.chunks is not None:
        out_TKGH = _attend_chunks(q_TKGH, out_TKGH, pool, layer, metadata.chunks, layout, spec, sinks_KG, tiles)
    if v_scale is not None:
        out_TKGH *= jnp.reshape(jnp.asarray(v_scale, jnp.float32), (-1, 1, 1))
    return out_TKGH.reshape(q.shape).astype(q.dtype), pool


def _group_decodes(batch, num_tokens, layout, spec, tiles) -> DecodeGroups:
    num_rows = min(batch.kv_lens.shape[0], num_tokens)
    group = min(tiles.decode_rows, num_rows)
    is_decode = spec.decode_only | (jnp.arange(num_rows) < batch.num_decodes)
    lens = jnp.where(is_decode, batch.kv_lens[:num_rows], 0)
    order = jnp.argsort(-lens, stable=True).astype(jnp.int32)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(num_rows, dtype=jnp.int32), unique_indices=True)
    padding = -num_rows % group
    order = jnp.pad(order, (0, padding))
    lens = jnp.pad(lens, (0, padding))[order] * (jnp.arange(num_rows + padding) < num_rows)
    tables = _pad_to_blocks(batch.block_tables, tiles.decode_keys, layout)[order]
    return DecodeGroups(order, place, lens, tables, _cdiv(jnp.sum(lens > 0), group))


def _tile_chunks(batch, num_tokens, layout, tiles) -> ChunkTiles:
    num_rows, size = batch.kv_lens.shape[0], min(tiles.chunk_rows, num_tokens)
    starts, q_lens = batch.cu_q_lens[:-1], jnp.diff(batch.cu_q_lens)
    is_chunk = (jnp.arange(num_rows) >= batch.num_decodes) & (batch.kv_lens > 0)
    tiles_of_row = jnp.where(is_chunk, _cdiv(q_lens, size), 0)
    ends = jnp.cumsum(tiles_of_row)
    tile = jnp.arange(num_tokens // size + min(num_rows, num_tokens), dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, tile, side="right", method="compare_all"), num_rows - 1).astype(jnp.int32)
    offset = (tile - (ends - tiles_of_row)[row]) * size
    start = jnp.clip(starts[row] + offset, 0, num_tokens - size)
    first = starts[row] + offset - start
    position = batch.kv_lens[row] - q_lens[row] + offset - first
    count = jnp.clip(q_lens[row] - offset, 0, size)
    tables = _pad_to_blocks(batch.block_tables, tiles.chunk_keys, layout)
    return ChunkTiles(row, start, position, first, count, tables, ends[-1])


def _attend_decodes(q_TKGH, pool, layer, decodes: DecodeGroups, layout, spec, sinks_KG, tiles):
    """Float32[T, K, G, H] with the decodes' rows filled in and zeros elsewhere."""
    num_rows, num_places = decodes.place.shape[0], decodes.order.shape[0]
    size = min(tiles.decode_rows, num_rows)
    blocks = blocks_of(tiles.decode_keys, layout)
    keys = blocks * layout.block_size
    q_DKGH = q_TKGH[decodes.order]

    def group(g, out_DKGH):
        rows = lambda x: jax.lax.dynamic_slice_in_dim(x, g * size, size)
        q_RKGH, tables, lens = rows(q_DKGH), rows(decodes.tables), rows(decodes.lens)
        starts = jnp.zeros_like(lens) if spec.sliding_window is None else jnp.maximum(lens - spec.sliding_window, 0)
        first = starts // keys  # each row begins at its own window

        def step(i, state):
            if spec.sliding_window is None:
                ids = jax.lax.dynamic_slice_in_dim(tables, i * blocks, blocks, 1)
            else:
                index = (first[:, None] + i) * blocks + jnp.arange(blocks)
                ids = jnp.take_along_axis(tables, jnp.minimum(index, tables.shape[1] - 1), 1)
            position = (first[:, None] + i) * keys + jnp.arange(keys)
            visible_RC = (position >= starts[:, None]) & (position < lens[:, None])
            keys_RKCH, values_RKCH = heads_first(read_blocks(pool, layer, ids, layout), 2)
            return online_softmax(
                state,
                q_RKGH,
                keys_RKCH,
                jnp.where(visible_RC[:, None, :, None], values_RKCH, 0),  # unused slots may hold NaN, and 0 * NaN is NaN
                visible_RC[:, None, None, :],
                spec,
            )

        steps = jnp.max(_cdiv(lens, keys) - first)
        state = jax.lax.fori_loop(0, steps, step, initial_state(q_RKGH, sinks_KG))
        return jax.lax.dynamic_update_slice_in_dim(out_DKGH, normalised(state), g * size, 0)

    out_DKGH = jax.lax.fori_loop(0, decodes.num_groups, group, jnp.zeros_like(q_DKGH))
    out_TKGH = out_DKGH[decodes.place]
    return jnp.pad(out_TKGH, ((0, q_TKGH.shape[0] - num_rows), (0, 0), (0, 0), (0, 0)))


def _attend_chunks(q_TKGH, out_TKGH, pool, layer, chunks: ChunkTiles, layout, spec, sinks_KG, tiles):
    """`out_TKGH` with the chunks' rows filled in."""
    num_tokens, num_kv_heads, group, head_dim = q_TKGH.shape
    size = min(tiles.chunk_rows, num_tokens)
    blocks = blocks_of(tiles.chunk_keys, layout)
    keys = blocks * layout.block_size
    window = spec.sliding_window
    sinks_KR = None if sinks_KG is None else jnp.tile(sinks_KG, (1, size))  # R is (query, head of the group)

    def tile(w, out_TKGH):
        start, position, first, count = (x[w] for x in (chunks.start, chunks.position, chunks.first, chunks.count))
        q_QKGH = jax.lax.dynamic_slice_in_dim(q_TKGH, start, size)
        q_KRH = jnp.moveaxis(q_QKGH, 1, 0).reshape(num_kv_heads, size * group, head_dim)
        q_position_R = position + jnp.arange(size * group) // group
        begin, end = position + first, position + first + count
        lowest = 0 if window is None else jnp.maximum(begin - window + 1, 0)

        def step(i, state):
            ids = jax.lax.dynamic_slice(chunks.tables, (chunks.row[w], i * blocks), (1, blocks))[0]
            position_C = i * keys + jnp.arange(keys)
            ids = jnp.where((i * blocks + jnp.arange(blocks)) * layout.block_size < end, ids, DEAD_BLOCK)
            keys_KCH, values_KCH = heads_first(read_blocks(pool, layer, ids, layout), 1)
            used_C = (position_C >= lowest) & (position_C < end)
            visible_RC = position_C <= q_position_R[:, None]
            if window is not None:
                visible_RC &= position_C > q_position_R[:, None] - window
            return online_softmax(
                state, q_KRH, keys_KCH, jnp.where(used_C[:, None], values_KCH, 0), visible_RC, spec
            )

        state = jax.lax.fori_loop(lowest // keys, _cdiv(end, keys), step, initial_state(q_KRH, sinks_KR))
        new_QKGH = jnp.moveaxis(normalised(state).reshape(num_kv_heads, size, group, head_dim), 0, 1)
        old_QKGH = jax.lax.dynamic_slice_in_dim(out_TKGH, start, size)
        own = (jnp.arange(size) >= first) & (jnp.arange(size) < first + count)
        new_QKGH = jnp.where(own[:, None, None, None], new_QKGH, old_QKGH)
        return jax.lax.dynamic_update_slice_in_dim(out_TKGH, new_QKGH, start, 0)

    return jax.lax.fori_loop(0, chunks.num_tiles, tile, out_TKGH)


def initial_state(q, sinks):
    """Running maximum and sum [..., rows] and weighted values [..., rows, H] before any key.  A sink is a key without value."""
    maximum = jnp.full(q.shape[:-1], _MASKED) if sinks is None else jnp.broadcast_to(sinks, q.shape[:-1])
    total = jnp.zeros(q.shape[:-1]) if sinks is None else jnp.ones(q.shape[:-1])
    return maximum, total, jnp.zeros(q.shape, jnp.float32)


def online_softmax(state, q, keys, values, visible, spec):
    """One tile of keys: q [..., rows, H], keys and values [..., C, H], visible broadcastable to [..., rows, C]."""
    maximum, total, weighted = state
    logits = jnp.einsum("...rh,...ch->...rc", q, keys, precision="highest")
    if spec.soft_cap is not None:
        logits = spec.soft_cap * jnp.tanh(logits / spec.soft_cap)
    logits = jnp.where(visible, logits, _MASKED)
    new_maximum = jnp.maximum(maximum, logits.max(-1))
    weights = jnp.exp(logits - new_maximum[..., None])
    decay = jnp.exp(maximum - new_maximum)
    weighted = weighted * decay[..., None] + jnp.einsum(
        "...rc,...ch->...rh", weights, values, precision="highest"
    )
    return new_maximum, total * decay + weights.sum(-1), weighted


def normalised(state):
    _, total, weighted = state
    return weighted / jnp.where(total > 0, total, 1)[..., None]  # rows of padding saw no key at all


def heads_first(keys_and_values, axis):
    """[..., M, K, P, H] with M at `axis - 1` -> [..., K, M * P, H]."""
    return tuple(
        jnp.moveaxis(x, axis - 1, axis).reshape(*x.shape[: axis - 1], x.shape[axis], -1, x.shape[-1])
        for x in keys_and_values
    )


def _pad_to_blocks(block_tables, keys, layout):
    """Table columns padded with the dead block to whole iterations: a slice at the end must not move back."""
    return jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % blocks_of(keys, layout))))


def blocks_of(keys: int, layout: PoolLayout) -> int:
    return max(1, keys // layout.block_size)


def _cdiv(a, b):
    return (a + b - 1) // b
