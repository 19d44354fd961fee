"""Decode rows and chunks in Pallas Triton: one source for every GPU with mma.sync, from Ampere on.

Both kernels walk tiles of keys between the window's start and the last key, an online softmax in registers (base 2), and
leave the copies into shared memory and their overlap to Triton (cp.async, `stages` deep).  Every key's slot is looked up by
itself, so any block size does, and loads are masked: a slot that no token has reached, or behind the window, is 0 and is
never read, and neither are table entries for it.

    decode   grid (rows, kv heads x parts of a group, splits)    rows of a tile: the part's query heads, padded to 16
    chunks   grid (query tiles, kv heads)                        rows of a tile: (token, query head of the group)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.paged_attention.batch import AttentionSpec
from pallas_kernels.paged_attention.gpu_step import LOG2_E, MASKED, join_splits, online_softmax
from pallas_kernels.paged_attention.layout import DEAD_BLOCK, PoolLayout
from pallas_kernels.paged_attention.query_tiles import QueryTiles

SMALLEST_ROWS = 16
"""Of an mma.sync."""


@dataclass(frozen=True)
class TritonTiles:
    """Sizes chosen from the compiler's figures; none is tuned on hardware."""

    decode_rows: int = 64
    """Query heads a program takes at most."""
    decode_keys: int = 64
    decode_warps: int = 4
    decode_stages: int = 2
    decode_programs: int = 4 * 108
    """Programs wanted, rows x kv heads x splits: a few for each core, so that few long rows fill the chip."""
    max_splits: int = 32
    min_split_keys: int = 256
    chunk_rows: int = 64
    chunk_keys: int = 64
    chunk_warps: int = 4
    chunk_stages: int = 2

    def num_splits(self, num_programs: int, max_keys: int) -> int:
        """Pieces that a decode row is cut into: one where rows and heads fill the chip by themselves."""
        wanted = -(-self.decode_programs // num_programs)
        return max(1, min(wanted, self.max_splits, max_keys // self.min_split_keys))


# Traced and lowered once a program, however many layers call it.
@functools.partial(jax.jit, static_argnames=("layout", "spec", "tiles", "interpret"))
def decode_attention(
    q: jax.Array,  # [R, N, lanes]
    pool: jax.Array,  # [L, B, K, 2, P, lanes]
    layer: jax.Array | int,  # i32[]
    logit_scales: jax.Array,  # f32[K]
    tables: jax.Array,  # i32[R, max_blocks]
    lens: jax.Array,  # i32[R]: 0 for rows that are no decode
    *,
    layout: PoolLayout,
    spec: AttentionSpec,
    tiles: TritonTiles,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(out f32[R, N, lanes], log of the softmax's denominator f32[R, N], MASKED for rows of length 0, whose out is 0)."""
    num_rows, num_heads, lanes = q.shape
    group = num_heads // layout.num_kv_heads
    num_parts = -(-group // tiles.decode_rows)
    part = -(-group // num_parts)
    num_splits = tiles.num_splits(num_rows * layout.num_kv_heads * num_parts, tables.shape[1] * layout.block_size)
    shape = (num_rows, layout.num_kv_heads, num_splits, group)
    kernel = functools.partial(
        jserve_triton_decode, spec=spec, num_keys=tiles.decode_keys, min_keys=tiles.min_split_keys,
        tile_rows=max(SMALLEST_ROWS, pl.next_power_of_2(part)), num_parts=num_parts, part=part,
    )  # fmt: skip
    out, log_sum = _call(
        kernel,
        grid=(num_rows, layout.num_kv_heads * num_parts, num_splits),
        out_shape=(jax.ShapeDtypeStruct((*shape, lanes), jnp.float32), jax.ShapeDtypeStruct(shape, jnp.float32)),
        params=plgpu.CompilerParams(num_warps=tiles.decode_warps, num_stages=tiles.decode_stages),
        interpret=interpret,
    )(q, pool, tables, lens, logit_scales, jnp.reshape(jnp.asarray(layer, jnp.int32), (1,)))
    out, log_sum = join_splits(out, log_sum)
    return out.reshape(num_rows, num_heads, lanes), log_sum.reshape(num_rows, num_heads)


@functools.partial(jax.jit, static_argnames=("layout", "spec", "tiles", "tokens_a_tile", "interpret"))
def attend_chunks(
    q: jax.Array,  # [T, N, lanes]
    pool: jax.Array,  # [L, B, K, 2, P, lanes]
    layer: jax.Array | int,  # i32[]
    logit_scales: jax.Array,  # f32[K]
    tables: jax.Array,  # i32[S, max_blocks]
    kv_lens: jax.Array,  # i32[S]
    batch_tiles: QueryTiles,
    *,
    layout: PoolLayout,
    spec: AttentionSpec,
    tiles: TritonTiles,
    tokens_a_tile: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(out [T, N, lanes], natural log of the softmax's denominator f32[T, N]); anything for tokens of no chunk."""
    group = q.shape[1] // layout.num_kv_heads
    kernel = functools.partial(
        jserve_triton_chunks, spec=spec, num_keys=tiles.chunk_keys, group=group,
        tile_rows=max(SMALLEST_ROWS, pl.next_power_of_2(tokens_a_tile * group)),
    )  # fmt: skip
    geometry = batch_tiles.row, batch_tiles.token, batch_tiles.position, batch_tiles.count
    return _call(
        kernel,
        grid=(batch_tiles.row.shape[0], layout.num_kv_heads),
        out_shape=(jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:2], jnp.float32)),
        params=plgpu.CompilerParams(num_warps=tiles.chunk_warps, num_stages=tiles.chunk_stages),
        interpret=interpret,
    )(q, pool, tables, kv_lens, *geometry, logit_scales, jnp.reshape(jnp.asarray(layer, jnp.int32), (1,)))


def _call(kernel, grid, out_shape, params, interpret):
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel, grid=grid, out_shape=out_shape, compiler_params=params, interpret=interpret, out_specs=(anywhere, anywhere),
        name=kernel.func.__name__,
    )  # fmt: skip


def jserve_triton_decode(
    q,  # [R, N, lanes]
    pool,  # [L, B, K, 2, P, lanes]
    tables,  # i32[R, max_blocks]
    lens,  # i32[R]
    logit_scales,  # f32[K]
    layer,  # i32[1]
    out,  # f32[R, K, splits, G, lanes]
    log_sum,  # f32[R, K, splits, G], base 2
    *,
    spec: AttentionSpec,
    num_keys: int,
    min_keys: int,
    tile_rows: int,
    num_parts: int,
    part: int,
):
    row, program, split = (pl.program_id(axis) for axis in range(3))
    num_splits, group, lanes = out.shape[2:]
    head, first_head = program, jnp.int32(0)
    if num_parts > 1:
        head, first_head = lax.div(program, jnp.int32(num_parts)), lax.rem(program, jnp.int32(num_parts)) * part
    length = lens[row]
    first_key = jnp.int32(0) if spec.sliding_window is None else lax.max(length - spec.sliding_window, jnp.int32(0))
    first_tile = lax.div(first_key, jnp.int32(num_keys))
    num_tiles = _tiles_of(length, num_keys) - first_tile
    tiles_a_split = lax.max(_tiles_of(num_tiles, num_splits), jnp.int32(max(1, min_keys // num_keys)))
    start = first_tile + split * tiles_a_split
    end = lax.min(first_tile + num_tiles, start + tiles_a_split)

    member = first_head + lax.iota(jnp.int32, tile_rows)  # of the group
    is_used = (lax.iota(jnp.int32, tile_rows) < part) & (member < group)
    lane = _across((tile_rows, lanes))
    place = (row, _down(head * group + lax.min(member, jnp.int32(group - 1)), lanes), lane)
    queries = plgpu.load(q.at[place])
    sources = _Sources(pool, tables, layer[0], row, head, first_key, length, num_keys)

    def body(tile, carry):
        keys, values, position, is_live = sources.load(tile)
        logits = _logits(queries, keys, logit_scales[head], spec)
        logits = jnp.where(is_live[None, :], logits, MASKED)
        return _accumulate(carry, logits, values)

    accumulated, largest, total = lax.fori_loop(start, end, body, _nothing(tile_rows, lanes))
    divisor = jnp.where(total > 0, total, 1.0)
    place = (row, head, split, _down(member, lanes), lane)
    plgpu.store(out.at[place], accumulated / divisor[:, None], mask=_down(is_used, lanes))
    logs = jnp.where(total > 0, largest + jnp.log2(divisor), MASKED)
    plgpu.store(log_sum.at[row, head, split, member], logs, mask=is_used)


def jserve_triton_chunks(
    q,  # [T, N, lanes]
    pool,  # [L, B, K, 2, P, lanes]
    tables,  # i32[S, max_blocks]
    kv_lens,  # i32[S]
    tile_rows_of_batch,  # i32[W]
    tile_tokens,  # i32[W]
    tile_positions,  # i32[W]
    tile_counts,  # i32[W]
    logit_scales,  # f32[K]
    layer,  # i32[1]
    out,  # [T, N, lanes]
    log_sum,  # f32[T, N]
    *,
    spec: AttentionSpec,
    num_keys: int,
    group: int,
    tile_rows: int,
):
    tile, head = pl.program_id(0), pl.program_id(1)
    num_tokens, _, lanes = q.shape
    count, position = tile_counts[tile], tile_positions[tile]
    first_key = jnp.int32(0)
    if spec.sliding_window is not None:
        first_key = lax.max(position + 1 - spec.sliding_window, jnp.int32(0))
    first_tile = lax.div(first_key, jnp.int32(num_keys))
    end_tile = lax.select(count > 0, _tiles_of(position + count, num_keys), first_tile)

    member = lax.iota(jnp.int32, tile_rows)
    token = lax.div(member, jnp.full((tile_rows,), group, jnp.int32)) if group > 1 else member
    q_head = head * group + member - token * group
    is_used = token < count
    query = position + token
    flat = tile_tokens[tile] + token
    lane = _across((tile_rows, lanes))
    queries = plgpu.load(q.at[_down(lax.min(flat, jnp.int32(num_tokens - 1)), lanes), _down(q_head, lanes), lane])
    row = tile_rows_of_batch[tile]
    sources = _Sources(pool, tables, layer[0], row, head, first_key, position + count, num_keys)

    def body(t, carry, is_masked: bool):
        keys, values, key, _ = sources.load(t, is_masked)
        logits = _logits(queries, keys, logit_scales[head], spec)
        if is_masked:
            visible = key[None, :] <= query[:, None]
            if spec.sliding_window is not None:
                visible = visible & (key[None, :] > query[:, None] - spec.sliding_window)
            logits = jnp.where(visible, logits, MASKED)
        return _accumulate(carry, logits, values)

    carry, num_unmasked = _nothing(tile_rows, lanes), first_tile
    if spec.sliding_window is None:  # tiles wholly before the first query need no mask
        num_unmasked = lax.min(lax.div(position + 1, jnp.int32(num_keys)), end_tile)
        carry = lax.fori_loop(jnp.int32(0), num_unmasked, functools.partial(body, is_masked=False), carry)
    carry = lax.fori_loop(num_unmasked, end_tile, functools.partial(body, is_masked=True), carry)
    accumulated, largest, total = carry
    divisor = jnp.where(total > 0, total, 1.0)
    outside = jnp.where(is_used, flat, num_tokens)  # of the array, where nothing is stored
    result = (accumulated / divisor[:, None]).astype(out.dtype)
    plgpu.store(out.at[_down(outside, lanes), _down(q_head, lanes), lane], result, mask=_down(is_used, lanes))
    plgpu.store(log_sum.at[outside, q_head], (largest + jnp.log2(divisor)) * (1 / LOG2_E), mask=is_used)


@dataclass(frozen=True)
class _Sources:
    """Where one program's keys and values lie: those of a sequence from `first_key` to before `end_key`."""

    pool: jax.Array
    tables: jax.Array
    layer: jax.Array
    row: jax.Array
    head: jax.Array
    first_key: jax.Array
    end_key: jax.Array
    num_keys: int

    def load(self, tile, is_masked: bool = True):
        """(keys [keys, lanes], values, their positions, which of them are live); others are 0."""
        block_size, lanes = self.pool.shape[-2:]
        position = tile * self.num_keys + lax.iota(jnp.int32, self.num_keys)
        size = jnp.full((self.num_keys,), block_size, jnp.int32)
        index, offset = lax.div(position, size), lax.rem(position, size)
        is_live = (position >= self.first_key) & (position < self.end_key)
        if is_masked:
            block = plgpu.load(self.tables.at[self.row, index], mask=is_live, other=DEAD_BLOCK)
            options = {"mask": _down(is_live, lanes), "other": 0.0}
        else:
            block, options = plgpu.load(self.tables.at[self.row, index]), {}
        block = jnp.where((block >= 0) & (block < self.pool.shape[1]), block, DEAD_BLOCK)
        lane = _across((self.num_keys, lanes))
        at = lambda plane: self.pool.at[self.layer, _down(block, lanes), self.head, plane, _down(offset, lanes), lane]
        keys, values = (plgpu.load(at(plane), **options) for plane in (0, 1))
        return keys, values, position, is_live


def _tiles_of(length, size: int):
    return lax.div(length + (size - 1), jnp.int32(size))


def _down(x: jax.Array, lanes: int) -> jax.Array:
    return lax.broadcast_in_dim(x, (x.shape[0], lanes), (0,))


def _across(shape: tuple[int, int]) -> jax.Array:
    return lax.broadcast_in_dim(lax.iota(jnp.int32, shape[1]), shape, (1,))


def _nothing(rows: int, lanes: int):
    zeros = lambda *shape: jnp.zeros(shape, jnp.float32)
    return zeros(rows, lanes), jnp.full((rows,), MASKED, jnp.float32), zeros(rows)


def _logits(queries, keys, scale, spec: AttentionSpec) -> jax.Array:
    """Times log2(e), for exp2."""
    products = plgpu.dot(queries, keys, trans_b=True)
    if spec.soft_cap is None:
        return products * (scale * LOG2_E)
    doubled = jnp.exp2(products * (scale * (2 * LOG2_E / spec.soft_cap)))  # tanh: Triton has none of its own
    return (1 - 2 / (doubled + 1)) * (spec.soft_cap * LOG2_E)


def _accumulate(carry, logits, values):
    accumulated, largest, total = carry
    weights, total, largest, factor = online_softmax(logits, total, largest)
    product = plgpu.dot(weights.astype(values.dtype), values)
    return accumulated * factor[:, None] + product, largest, total
