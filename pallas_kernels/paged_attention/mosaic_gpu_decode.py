"""GPU decode: rows of one token attend to their blocks, each row cut into splits that a second stage puts together.

Grid (rows, kv heads, splits), one warpgroup a program; all query heads of a kv head, padded to 64 rows, are one wgmma
tile (rows are independent, and those that pad are garbage that is never stored).  A program walks its key tiles:

    fetch(t)   TMA of the tile's keys and values, one copy a block, into slot t % stages; a barrier for each of both
    wait keys  logits = q k^T, mask, online softmax in registers (base 2)
    wait values; weights through shared memory; output += weights v
    fetch(t + stages) into the slot just read

Shared memory: q, `stages` slots of keys and of values, weights, and the output on its way out in columns of 64.
Only tiles between the window's start and the row's end are walked, and no block outside them is read.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.batch import AttentionSpec
from pallas_kernels.paged_attention.gpu_step import join_splits, online_softmax
from pallas_kernels.paged_attention.layout import DEAD_BLOCK, PoolLayout
from pallas_kernels.paged_attention.mosaic_gpu_ops import (
    COMPILER_PARAMS,
    LOG2_E,
    MASKED,
    WARPGROUP_ROWS,
    Ops,
    clear_rows_from,
    columns_of,
    i32,
    store_untiled,
    strip_sizes,
    tensor_memory,
    tiled_buffer,
)
from pallas_kernels.paged_attention.mosaic_gpu_tiles import GpuTiles, blocks_per_tile, is_narrow


# Traced and lowered once a program, however many layers call it: a second each otherwise.
@functools.partial(jax.jit, static_argnames=("layout", "spec", "tiles", "interpret"))
def decode_attention(
    q: jax.Array,  # [R, N, lanes], of the type that is computed with
    pool: jax.Array,  # [L, B, K, 2, P, lanes]
    layer: jax.Array | int,  # i32[]
    logit_scales: jax.Array,  # f32[K]
    tables: jax.Array,  # i32[R, max_blocks]
    lens: jax.Array,  # i32[R]: 0 for rows that are no decode
    *,
    layout: PoolLayout,
    spec: AttentionSpec,
    tiles: GpuTiles,
    interpret=False,
) -> tuple[jax.Array, jax.Array]:
    """(out f32[R, N, lanes], log of the softmax's denominator f32[R, N], MASKED for rows of length 0, whose out is 0)."""
    num_rows, num_heads, lanes = q.shape
    group = num_heads // layout.num_kv_heads
    num_parts = -(-group // WARPGROUP_ROWS)  # a kv head of more query heads than a tile has rows is walked several times
    part = -(-group // num_parts)
    group_rows = -(-part // 8) * 8
    num_splits = tiles.num_splits(num_rows, layout.num_kv_heads * num_parts, tables.shape[1] * layout.block_size)
    q_RKGH = q.reshape(num_rows, layout.num_kv_heads, group, lanes)
    q_RKGH = jnp.pad(q_RKGH, ((0, 0), (0, 0), (0, part * num_parts - group), (0, 0)))
    q_RKGH = q_RKGH.reshape(num_rows, layout.num_kv_heads * num_parts, part, lanes)
    q_RKGH = jnp.pad(q_RKGH, ((0, 0), (0, 0), (0, group_rows - part), (0, 0)))
    num_copies = blocks_per_tile(tiles.decode_keys, layout.block_size)
    sizes = num_splits, num_parts, group_rows, lanes
    geometry = _Geometry(layout.block_size, tiles, *sizes, spec, pool.shape[1], is_narrow(layout))
    buffer = functools.partial(tiled_buffer, swizzle=tiles.swizzle_bytes)
    key_tiles = buffer(tiles.decode_stages, tiles.decode_keys, lanes, dtype=pool.dtype)
    has_tensor_memory = tiles.instruction == "tcgen05" and not interpret
    strips = strip_sizes(lanes, tiles.strip_lanes)
    kernel = plgpu.kernel(
        functools.partial(_kernel, geometry=geometry, ops=Ops(bool(interpret))),
        out_type=(
            jax.ShapeDtypeStruct((num_rows, layout.num_kv_heads * num_parts, num_splits, group_rows, lanes), jnp.float32),
            jax.ShapeDtypeStruct((num_rows, layout.num_kv_heads * num_parts, num_splits, group_rows), jnp.float32),
        ),
        grid=(num_rows, layout.num_kv_heads * num_parts, num_splits),
        grid_names=("row", "head", "split"),
        scratch_types=[
            buffer(WARPGROUP_ROWS, lanes, dtype=q.dtype),
            key_tiles,
            key_tiles,
            buffer(WARPGROUP_ROWS, tiles.decode_keys, dtype=q.dtype),
            plgpu.SMEM((WARPGROUP_ROWS, tiles.decode_columns), jnp.float32),
            plgpu.SMEM((WARPGROUP_ROWS,), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=num_copies, num_barriers=tiles.decode_stages),
            plgpu.Barrier(num_arrivals=num_copies, num_barriers=tiles.decode_stages),
            *([buffer(tiles.decode_keys, lanes, dtype=q.dtype)] if is_narrow(layout) else []),
            *(tensor_memory(tiles.decode_keys, strips) if has_tensor_memory else []),
        ],
        compiler_params=COMPILER_PARAMS,
        interpret=interpret,
        kernel_name="jserve_decode",
    )
    out, log_sum = kernel(q_RKGH, pool, tables, lens, logit_scales, jnp.reshape(i32(layer), (1,)))
    out, log_sum = join_splits(out[:, :, :, :part], log_sum[..., :part])  # [R, K * parts, part, ...]
    out = out.reshape(num_rows, layout.num_kv_heads, -1, lanes)[:, :, :group]
    log_sum = log_sum.reshape(num_rows, layout.num_kv_heads, -1)[:, :, :group]
    return out.reshape(num_rows, num_heads, lanes), log_sum.reshape(num_rows, num_heads)


@dataclass(frozen=True)
class _Geometry:
    block_size: int
    tiles: GpuTiles
    num_splits: int
    num_parts: int
    group_rows: int
    lanes: int
    spec: AttentionSpec
    num_blocks: int
    is_narrow: bool


def _kernel(
    q,  # [R, K * parts, group_rows, lanes]
    pool,  # [L, B, K, 2, P, lanes]
    tables,  # i32[R, max_blocks]
    lens,  # i32[R]
    logit_scales,  # f32[K]
    layer,  # i32[1]
    out,  # f32[R, K * parts, splits, group_rows, lanes]
    log_sum,  # f32[R, K * parts, splits, group_rows], base 2
    q_tile,  # [64, lanes]
    key_tiles,  # [stages, keys, lanes]
    value_tiles,  # [stages, keys, lanes]
    weights_tile,  # [64, keys]
    out_tile,  # f32[64, decode_columns]
    log_sum_tile,  # f32[64]
    q_arrived,
    keys_arrived,  # [stages]
    values_arrived,  # [stages]
    *more,  # [keys, lanes] that 8-bit keys, then values, are widened into; tensor memory
    geometry: _Geometry,
    ops: Ops,
):
    wide_tile, tensor_scratch = (more[0], more[1:]) if geometry.is_narrow else (None, more)
    if tensor_scratch:
        ops = ops.with_memory(tensor_scratch)
    spec, tiles, lanes, num_splits = geometry.spec, geometry.tiles, geometry.lanes, geometry.num_splits
    num_keys, stages = tiles.decode_keys, tiles.decode_stages
    row, head, split = lax.axis_index("row"), lax.axis_index("head"), lax.axis_index("split")
    kv_head = head if geometry.num_parts == 1 else lax.div(head, i32(geometry.num_parts))
    length = lens[row]
    first_key = i32(0) if spec.sliding_window is None else lax.max(length - spec.sliding_window, i32(0))
    first_tile = lax.div(first_key, i32(num_keys))
    num_tiles = lax.div(length + (num_keys - 1), i32(num_keys)) - first_tile
    tiles_a_split = lax.max(
        lax.div(num_tiles + (num_splits - 1), i32(num_splits)), i32(max(1, tiles.min_split_keys // num_keys))
    )
    start = first_tile + split * tiles_a_split
    count = lax.clamp(i32(0), first_tile + num_tiles - start, tiles_a_split)

    def sources(t):
        sizes = num_keys, geometry.block_size, geometry.num_blocks
        return tile_sources(tables, row, start + t, first_key, length, *sizes)

    def fetch(t_slot, found):
        for plane, tiles_ref, arrived in ((0, key_tiles, keys_arrived), (1, value_tiles, values_arrived)):
            slot_refs = tiles_ref.at[t_slot], arrived.at[t_slot]
            copy_tile(pool, layer[0], kv_head, plane, found, *slot_refs, geometry.block_size)

    @pl.when(count > 0)
    def _():
        plgpu.copy_gmem_to_smem(q.at[row, head], q_tile.at[pl.ds(0, geometry.group_rows)], q_arrived)
        for t in range(stages):

            @pl.when(t < count)
            def _():
                fetch(t, sources(i32(t)))

        plgpu.barrier_wait(q_arrived)

    def widened(narrow_tile):
        if wide_tile is None:
            return narrow_tile
        ops.widen(narrow_tile, wide_tile)
        return wide_tile

    logit_scale = logit_scales[kv_head]

    def body(t, carry):
        strips, largest, total = carry
        slot = lax.rem(t, i32(stages))
        following = sources(t + stages)  # asked for early: its way from memory is hidden by the tile's work
        plgpu.barrier_wait(keys_arrived.at[slot])
        logits = scaled_logits(ops.matmul_transposed(q_tile, widened(key_tiles.at[slot])), spec, logit_scale)
        position = ops.iota((WARPGROUP_ROWS, num_keys), 1) + (start + t) * num_keys
        visible = position < length
        if spec.sliding_window is not None:
            visible = visible & (position >= first_key)
        logits = jnp.where(visible, logits, MASKED)
        weights, total, largest, factor = online_softmax(logits, total, largest)
        weights_tile[...] = weights.astype(weights_tile.dtype)
        plgpu.commit_smem()
        plgpu.barrier_wait(values_arrived.at[slot])
        values = widened(value_tiles.at[slot])
        num_valid = length - (start + t) * num_keys

        @pl.when(num_valid < num_keys)
        def _():
            clear_rows_from(ops, values, num_valid)

        strips = ops.accumulate(strips, factor, weights_tile, values)

        @pl.when(t + stages < count)
        def _():
            fetch(slot, following)

        return strips, largest, total

    nothing = ops.zero_strips(lanes, tiles.strip_lanes), ops.full((WARPGROUP_ROWS,), MASKED), ops.full((WARPGROUP_ROWS,), 0.0)
    strips, largest, total = lax.fori_loop(i32(0), count, body, nothing)

    divisor = jnp.where(total > 0, total, 1.0)
    store_untiled(log_sum_tile, jnp.where(total > 0, largest + jnp.log2(divisor), MASKED))
    columns = tiles.decode_columns
    for first in range(0, lanes, columns):
        result = columns_of(strips, first, columns)
        store_untiled(out_tile, result / lax.broadcast_in_dim(divisor, result.shape, [0]))
        plgpu.commit_smem()
        destination = out.at[row, head, split, :, pl.ds(first, columns)]
        plgpu.copy_smem_to_gmem(out_tile.at[pl.ds(0, geometry.group_rows)], destination)
        if first == 0:
            plgpu.copy_smem_to_gmem(log_sum_tile.at[pl.ds(0, geometry.group_rows)], log_sum.at[row, head, split])
        plgpu.wait_smem_to_gmem(0)


def tile_sources(tables, row, tile, first_key, end_key, num_keys: int, block_size: int, num_blocks: int):
    """[(block id, first token in the block)] that a tile of `num_keys` keys is fetched from.

    Entries outside first_key .. end_key - 1 are never looked at, their blocks may be freed: the nearest live one is read
    again.
    """
    first_block, last_block = lax.div(first_key, i32(block_size)), lax.div(end_key - 1, i32(block_size))
    found = []
    for j in range(blocks_per_tile(num_keys, block_size)):
        position = tile * num_keys + j * block_size
        index = lax.clamp(first_block, lax.div(position, i32(block_size)), lax.max(last_block, i32(0)))
        block = tables[row, index]
        block = lax.select((block >= 0) & (block < num_blocks), block, i32(DEAD_BLOCK))
        found.append((block, lax.rem(position, i32(block_size)) if block_size > num_keys else None))
    return found


def copy_tile(pool, layer, head, plane: int, found, destination, arrived, block_size: int) -> None:
    """TMA of a tile's keys (plane 0) or values (plane 1) from where `tile_sources` found them; an arrival a block."""
    for j, (block, offset) in enumerate(found):
        source = pool.at[layer, block, head, plane]
        if offset is None:
            plgpu.copy_gmem_to_smem(source, destination.at[pl.ds(j * block_size, block_size)], arrived)
        else:
            num_keys = destination.shape[0]
            part = pl.ds(pl.multiple_of(offset, num_keys), num_keys)
            plgpu.copy_gmem_to_smem(source.at[part], destination, arrived)


def scaled_logits(products: jax.Array, spec: AttentionSpec, scale: jax.Array) -> jax.Array:
    """q.k products -> logits times log2(e), for exp2.  `scale` f32[] is the spec's times that of the stored keys."""
    if spec.soft_cap is None:
        return products * (scale * LOG2_E)
    return jnp.tanh(products * (scale * (1 / spec.soft_cap))) * (spec.soft_cap * LOG2_E)
