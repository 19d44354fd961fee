"""GPU chunks: tiles of one sequence's queries attend to its blocks, causally by absolute position.

Grid (query tiles, kv heads).  A tile's rows are (token, query head of the group), 64 for each compute warpgroup; one
more warpgroup fetches.  Over the key tiles from the window's start to the tile's last position:

    fetching    reads the block table; TMA of keys, then values, into slot t % stages, once it was freed
    computing   logits = q k^T; frees the keys; mask where the tile crosses the diagonal or the window; online softmax
                in registers (base 2); output += weights v, weights as register operand; frees the values

A chunk may start at any flat token, so queries come through registers (TMA takes multiples of 8 rows into tiled shared
memory), and an incomplete tile leaves in pieces of powers of two, so that it touches no row of the next sequence.
Pools of 8 bits: the fetching warpgroup widens each tile to 16 bits on its way, so that computing is the same.

Shared memory: q and the output of each compute warpgroup, `stages` slots of keys and of values; of 8-bit ones, twice.
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
from pallas_kernels.paged_attention.gpu_step import online_softmax
from pallas_kernels.paged_attention.layout import PoolLayout
from pallas_kernels.paged_attention.mosaic_gpu_decode import copy_tile, scaled_logits, tile_sources
from pallas_kernels.paged_attention.mosaic_gpu_ops import (
    BEFORE_0_11,
    COMPILER_PARAMS,
    LOG2_E,
    MASKED,
    WARPGROUP_ROWS,
    Ops,
    clear_rows_from,
    i32,
    load_rows,
    columns_of,
    store_untiled,
    strip_sizes,
    tensor_memory,
    tiled_buffer,
)
from pallas_kernels.paged_attention.mosaic_gpu_tiles import GpuTiles, blocks_per_tile, compute_type, is_narrow
from pallas_kernels.paged_attention.query_tiles import QueryTiles

REGISTERS = {  # fetching, and computing by number of warpgroups that do
    "wgmma": (56, {1: 248, 2: 224, 3: 144}),
    "wgmma, clears apart": (72, {1: 248, 2: 216, 3: 144}),
    "tcgen05": (88, {1: 232, 2: 208, 3: 136}),
    "widening": (104, {1: 248, 2: 200, 3: 128}),
}
"""All together may have 512, less a few that the launch rounds off; beyond, the hardware would wait for ever."""


# Traced and lowered once a program, however many layers call it: a second each otherwise.
@functools.partial(jax.jit, static_argnames=("layout", "spec", "tiles", "interpret"))
def attend_chunks(
    q: jax.Array,  # [T, N, lanes], of the type that is computed with
    pool: jax.Array,  # [L, B, K, 2, P, lanes]
    layer: jax.Array | int,  # i32[]
    logit_scales: jax.Array,  # f32[K]
    tables: jax.Array,  # i32[S, max_blocks]
    kv_lens: jax.Array,  # i32[S]
    batch_tiles: QueryTiles,
    *,
    layout: PoolLayout,
    spec: AttentionSpec,
    tiles: GpuTiles,
    interpret=False,
) -> tuple[jax.Array, jax.Array]:
    """(out [T, N, lanes], natural log of the softmax's denominator f32[W, K, rows of a tile]).

    Rows of `out` that are of no chunk hold anything.
    """
    num_tokens, num_heads, lanes = q.shape
    group = num_heads // layout.num_kv_heads
    rows = tiles.chunk_warpgroups * WARPGROUP_ROWS
    q_KRH = jnp.moveaxis(q.reshape(num_tokens, layout.num_kv_heads, group, lanes), 1, 0)
    q_KRH = q_KRH.reshape(layout.num_kv_heads, num_tokens * group, lanes)
    q_KRH = jnp.pad(q_KRH, ((0, 0), (0, rows), (0, 0)))  # the last tile reads on
    num_tiles, num_copies = batch_tiles.row.shape[0], blocks_per_tile(tiles.chunk_keys, layout.block_size)
    geometry = _Geometry(layout.block_size, tiles, group, lanes, spec, pool.shape[1], is_narrow(layout))
    buffer = functools.partial(tiled_buffer, swizzle=tiles.swizzle_bytes)
    key_tiles = buffer(tiles.chunk_stages, tiles.chunk_keys, lanes, dtype=q.dtype)
    arrivals = functools.partial(plgpu.Barrier, num_barriers=tiles.chunk_stages)
    if geometry.is_narrow:
        narrow_tiles = tiled_buffer(tiles.chunk_narrow_stages, tiles.chunk_keys, lanes, dtype=pool.dtype)
        narrow_arrivals = plgpu.Barrier(num_arrivals=num_copies, num_barriers=tiles.chunk_narrow_stages)
        narrow = [narrow_tiles, narrow_tiles, narrow_arrivals, narrow_arrivals]
        num_copies = 1  # of wide tiles: they arrive once, when they are widened
    else:
        narrow = []
    blackwell = []
    if tiles.instruction == "tcgen05":
        blackwell = [buffer(tiles.chunk_warpgroups, WARPGROUP_ROWS, tiles.chunk_keys, dtype=q.dtype)]
        strips = strip_sizes(lanes, tiles.strip_lanes)
        blackwell += [] if interpret else tiles.chunk_warpgroups * tensor_memory(tiles.chunk_keys, strips)
    kernel = plgpu.kernel(
        functools.partial(_kernel, geometry=geometry, ops=Ops(bool(interpret))),
        out_type=(
            jax.ShapeDtypeStruct(q_KRH.shape, q.dtype),
            jax.ShapeDtypeStruct((num_tiles, layout.num_kv_heads, rows), jnp.float32),
        ),
        grid=(num_tiles, layout.num_kv_heads),
        grid_names=("tile", "head"),
        num_threads=tiles.chunk_warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=[
            buffer(tiles.chunk_warpgroups, WARPGROUP_ROWS, lanes, dtype=q.dtype),
            key_tiles,
            key_tiles,
            plgpu.SMEM((tiles.chunk_warpgroups, WARPGROUP_ROWS, min(lanes, tiles.output_columns)), q.dtype),
            plgpu.SMEM((tiles.chunk_warpgroups, WARPGROUP_ROWS), jnp.float32),
            arrivals(num_arrivals=num_copies),
            arrivals(num_arrivals=num_copies),
            arrivals(num_arrivals=tiles.chunk_warpgroups),
            arrivals(num_arrivals=tiles.chunk_warpgroups),
            plgpu.Barrier(num_arrivals=num_copies),
            *narrow,
            *blackwell,
        ],
        compiler_params=COMPILER_PARAMS,
        interpret=interpret,
        kernel_name="jserve_chunks",
    )
    scalars = (tables, kv_lens, batch_tiles.row, batch_tiles.token, batch_tiles.position, batch_tiles.count)
    out, log_sum = kernel(q_KRH, pool, *scalars, logit_scales, jnp.reshape(i32(layer), (1,)))
    out = out[:, : num_tokens * group].reshape(layout.num_kv_heads, num_tokens, group, lanes)
    return jnp.moveaxis(out, 0, 1).reshape(q.shape), log_sum


@dataclass(frozen=True)
class _Geometry:
    block_size: int
    tiles: GpuTiles
    group: int
    lanes: int
    spec: AttentionSpec
    num_blocks: int
    is_narrow: bool

    @property
    def clears_apart(self) -> bool:
        """The tail is cleared outside the fetching loop, with more registers: within, heads of 256 spill from jax 0.11 on.

        Before, it is this that would spill.
        """
        return self.lanes > 128 and self.tiles.instruction == "wgmma" and not BEFORE_0_11

    @property
    def registers(self) -> str:
        """The key of REGISTERS."""
        if self.is_narrow:
            return "widening"
        return "wgmma, clears apart" if self.clears_apart else self.tiles.instruction


@dataclass(frozen=True)
class _Walk:
    """What one program goes through: `num_key_tiles` tiles of keys from `first_tile` on."""

    row: jax.Array
    head: jax.Array
    position: jax.Array  # of the tile's first query
    first_key: jax.Array  # the first that any query of the tile sees
    end_key: jax.Array  # after the sequence's last
    first_tile: jax.Array
    num_key_tiles: jax.Array
    logit_scale: jax.Array  # f32[]


def _kernel(
    q,  # [K, T * G + rows of a tile, lanes]
    pool,  # [L, B, K, 2, P, lanes]
    tables,  # i32[S, max_blocks]
    kv_lens,  # i32[S]
    tile_rows,  # i32[W]
    tile_tokens,  # i32[W]
    tile_positions,  # i32[W]
    tile_counts,  # i32[W]
    logit_scales,  # f32[K]
    layer,  # i32[1]
    out,  # [K, T * G + rows of a tile, lanes]
    log_sum,  # f32[W, K, rows of a tile]
    q_tiles,  # [warpgroups, 64, lanes]
    key_tiles,  # [stages, keys, lanes]
    value_tiles,  # [stages, keys, lanes]
    out_tiles,  # [warpgroups, 64, columns]
    log_sum_tiles,  # f32[warpgroups, 64]
    keys_arrived,  # [stages]
    values_arrived,  # [stages]
    keys_free,  # [stages]
    values_free,  # [stages]
    tail_arrived,
    *more,  # key tiles and value tiles of 8 bits, and their arrivals; weights and tensor memory of each warpgroup
    geometry: _Geometry,
    ops: Ops,
):
    spec, tiles, num_keys = geometry.spec, geometry.tiles, geometry.tiles.chunk_keys
    fetch_registers, compute_registers = REGISTERS[geometry.registers]
    narrow, blackwell = (more[:4], more[4:]) if geometry.is_narrow else ((), more)
    tile, head, warpgroup = lax.axis_index("tile"), lax.axis_index("head"), lax.axis_index("warpgroup")
    count, position = tile_counts[tile], tile_positions[tile]
    end_of_causal = position + count  # keys from here on are later than every query of the tile
    first_key = i32(0)
    if spec.sliding_window is not None:
        first_key = lax.max(position + 1 - spec.sliding_window, i32(0))
    first_tile = lax.div(first_key, i32(num_keys))
    num_key_tiles = lax.div(end_of_causal + (num_keys - 1), i32(num_keys)) - first_tile
    num_key_tiles = lax.select(count > 0, num_key_tiles, i32(0))
    row = tile_rows[tile]
    walk = _Walk(row, head, position, first_key, kv_lens[row], first_tile, num_key_tiles, logit_scales[head])

    @pl.when((warpgroup == tiles.chunk_warpgroups) & (num_key_tiles > 0))
    def _():
        slots = key_tiles, value_tiles, keys_arrived, values_arrived, keys_free, values_free
        plgpu.set_max_registers(fetch_registers, action="decrease")
        if geometry.is_narrow:
            _fetch_and_widen(pool, tables, layer[0], *slots, *narrow, walk=walk, geometry=geometry, ops=ops)
        else:
            _fetch(pool, tables, layer[0], *slots, tail_arrived, walk=walk, geometry=geometry, ops=ops)
        _wait_until_free(keys_free, values_free, walk.num_key_tiles, tiles.chunk_stages)

    def compute(ops: Ops, weights_tiles):
        plgpu.set_max_registers(compute_registers[tiles.chunk_warpgroups], action="increase")
        first_row = tile_tokens[tile] * geometry.group + warpgroup * WARPGROUP_ROWS
        q_tile, out_tile, log_sum_tile = (x.at[warpgroup] for x in (q_tiles, out_tiles, log_sum_tiles))
        q_rows = load_rows(q, head, first_row, WARPGROUP_ROWS, ops.interpreted)
        q_tile[...] = ops.cast(q_rows, plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        slots = key_tiles, value_tiles, keys_arrived, values_arrived, keys_free, values_free
        weights_tile = None if weights_tiles is None else weights_tiles.at[warpgroup]
        own = {"weights_tile": weights_tile, "warpgroup": warpgroup, "ops": ops}
        strips, logs = _compute(q_tile, *slots, **own, walk=walk, geometry=geometry)
        valid_rows = lax.clamp(i32(0), count * geometry.group - warpgroup * WARPGROUP_ROWS, i32(WARPGROUP_ROWS))
        store_untiled(log_sum_tile, logs)
        columns = out_tile.shape[1]
        for first in range(0, geometry.lanes, columns):
            store_untiled(out_tile, columns_of(strips, first, columns).astype(out_tile.dtype))
            plgpu.commit_smem()
            _store_rows(out_tile, out, head, first_row, valid_rows, first)
            if first == 0:
                log_sums = log_sum.at[tile, head, pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)]
                plgpu.copy_smem_to_gmem(log_sum_tile, log_sums)
            plgpu.wait_smem_to_gmem(0)

    weights_tiles, *tensor_scratch = blackwell or [None]
    if tensor_scratch:  # each warpgroup has its own, which nothing but its number tells apart
        size = len(tensor_scratch) // tiles.chunk_warpgroups
        for index in range(tiles.chunk_warpgroups):
            own_ops = ops.with_memory(tensor_scratch[index * size : (index + 1) * size])
            pl.when((warpgroup == index) & (num_key_tiles > 0))(functools.partial(compute, own_ops, weights_tiles))
    else:
        is_computing = (warpgroup < tiles.chunk_warpgroups) & (num_key_tiles > 0)
        pl.when(is_computing)(functools.partial(compute, ops, weights_tiles))


def _fetch(
    pool, tables, layer, key_tiles, value_tiles, keys_arrived, values_arrived, keys_free, values_free, tail_arrived,
    *, walk: _Walk, geometry: _Geometry, ops: Ops,
):  # fmt: skip
    num_keys, stages, size = geometry.tiles.chunk_keys, geometry.tiles.chunk_stages, geometry.block_size

    def body(t, _, may_be_tail: bool = True):
        slot = lax.rem(t, i32(stages))
        tile = walk.first_tile + t
        found = tile_sources(
            tables, walk.row, tile, walk.first_key, walk.end_key, num_keys, size, geometry.num_blocks
        )

        @pl.when(t >= stages)
        def _():
            plgpu.barrier_wait(keys_free.at[slot])

        copy_tile(pool, layer, walk.head, 0, found, key_tiles.at[slot], keys_arrived.at[slot], size)

        @pl.when(t >= stages)
        def _():
            plgpu.barrier_wait(values_free.at[slot])

        if not may_be_tail:
            copy_tile(pool, layer, walk.head, 1, found, value_tiles.at[slot], values_arrived.at[slot], size)
            return 0
        num_valid = walk.end_key - tile * num_keys
        is_tail = num_valid < num_keys

        @pl.when(~is_tail)
        def _():
            copy_tile(pool, layer, walk.head, 1, found, value_tiles.at[slot], values_arrived.at[slot], size)

        @pl.when(is_tail)  # the sequence's last tile: what no token has reached is cleared before anybody multiplies it
        def _():
            copy_tile(pool, layer, walk.head, 1, found, value_tiles.at[slot], tail_arrived, size)
            plgpu.barrier_wait(tail_arrived)
            clear_rows_from(ops, value_tiles.at[slot], num_valid)
            for _ in found:
                plgpu.barrier_arrive(values_arrived.at[slot])

        return 0

    if geometry.clears_apart:  # only the walk's last tile can be a tail
        lax.fori_loop(i32(0), walk.num_key_tiles - 1, functools.partial(body, may_be_tail=False), 0)
        body(walk.num_key_tiles - 1, 0)
    else:
        lax.fori_loop(i32(0), walk.num_key_tiles, body, 0)


def _fetch_and_widen(
    pool, tables, layer, key_tiles, value_tiles, keys_arrived, values_arrived, keys_free, values_free,
    narrow_keys, narrow_values, narrow_keys_arrived, narrow_values_arrived, *, walk: _Walk, geometry: _Geometry, ops: Ops,
):  # fmt: skip
    """`_fetch` of a pool of 8 bits: the copies run ahead of what is widened and handed on."""
    num_keys, size = geometry.tiles.chunk_keys, geometry.block_size
    stages, narrow_stages = geometry.tiles.chunk_stages, geometry.tiles.chunk_narrow_stages
    planes = (
        (narrow_keys, narrow_keys_arrived, key_tiles, keys_free, keys_arrived),
        (narrow_values, narrow_values_arrived, value_tiles, values_free, values_arrived),
    )

    def request(t, narrow_slot):
        tile = walk.first_tile + t
        found = tile_sources(tables, walk.row, tile, walk.first_key, walk.end_key, num_keys, size, geometry.num_blocks)
        for plane, (narrow, arrived, *_) in enumerate(planes):
            copy_tile(pool, layer, walk.head, plane, found, narrow.at[narrow_slot], arrived.at[narrow_slot], size)

    def body(t, _):
        slot, narrow_slot = lax.rem(t, i32(stages)), lax.rem(t, i32(narrow_stages))
        num_valid = walk.end_key - (walk.first_tile + t) * num_keys
        for plane, (narrow, narrow_arrived, wide, free, arrived) in enumerate(planes):

            @pl.when(t >= stages)
            def _():
                plgpu.barrier_wait(free.at[slot])

            plgpu.barrier_wait(narrow_arrived.at[narrow_slot])
            ops.widen(narrow.at[narrow_slot], wide.at[slot])
            if plane == 1:

                @pl.when(num_valid < num_keys)
                def _():
                    clear_rows_from(ops, wide.at[slot], num_valid)

            plgpu.barrier_arrive(arrived.at[slot])

        @pl.when(t + narrow_stages < walk.num_key_tiles)
        def _():
            request(t + narrow_stages, narrow_slot)

        return 0

    for t in range(narrow_stages):

        @pl.when(t < walk.num_key_tiles)
        def _():
            request(i32(t), t)

    lax.fori_loop(i32(0), walk.num_key_tiles, body, 0)


def _wait_until_free(keys_free, values_free, num_key_tiles, stages: int) -> None:
    """Every arrival is waited for, so that barriers end as they began."""

    def body(t, _):
        slot = lax.rem(t, i32(stages))
        plgpu.barrier_wait(keys_free.at[slot])
        plgpu.barrier_wait(values_free.at[slot])
        return 0

    lax.fori_loop(lax.max(num_key_tiles - stages, i32(0)), num_key_tiles, body, 0)


def _compute(
    q_tile, key_tiles, value_tiles, keys_arrived, values_arrived, keys_free, values_free,
    *, weights_tile, warpgroup, walk: _Walk, geometry: _Geometry, ops: Ops,
):  # fmt: skip
    """(strips of the output float32[64, lanes], natural log of the denominator float32[64]) of one warpgroup's rows.

    Weights go through `weights_tile` where the matrix unit does not take them from registers.
    """
    spec, lanes = geometry.spec, geometry.lanes
    num_keys, stages = geometry.tiles.chunk_keys, geometry.tiles.chunk_stages

    def body(t, carry, is_masked: bool):
        strips, largest, total = carry
        slot = lax.rem(t, i32(stages))
        plgpu.barrier_wait(keys_arrived.at[slot])
        products = ops.matmul_transposed(q_tile, key_tiles.at[slot])
        plgpu.barrier_arrive(keys_free.at[slot])
        logits = scaled_logits(products, spec, walk.logit_scale)
        if is_masked:
            key = ops.iota(logits.shape, 1) + (walk.first_tile + t) * num_keys
            token = ops.iota(logits.shape, 0) + warpgroup * WARPGROUP_ROWS
            if geometry.group > 1:
                token = lax.div(token, jnp.full(logits.shape, geometry.group, jnp.int32))
            query = token + walk.position
            visible = key <= query
            if spec.sliding_window is not None:
                visible = visible & (key > query - spec.sliding_window)
            logits = jnp.where(visible, logits, MASKED)
        weights, total, largest, factor = online_softmax(logits, total, largest)
        weights = weights.astype(value_tiles.dtype)
        if weights_tile is not None:
            weights_tile[...] = weights
            plgpu.commit_smem()
            weights = weights_tile
        plgpu.barrier_wait(values_arrived.at[slot])
        strips = ops.accumulate(strips, factor, weights, value_tiles.at[slot])
        plgpu.barrier_arrive(values_free.at[slot])
        return strips, largest, total

    zeros = ops.zero_strips(lanes, geometry.tiles.strip_lanes)
    carry = zeros, ops.full((WARPGROUP_ROWS,), MASKED), ops.full((WARPGROUP_ROWS,), 0.0)
    num_unmasked = i32(0)
    if spec.sliding_window is None:  # tiles wholly before the first query need no mask
        num_unmasked = lax.min(lax.div(walk.position + 1, i32(num_keys)), walk.num_key_tiles)
        carry = lax.fori_loop(i32(0), num_unmasked, functools.partial(body, is_masked=False), carry)
    carry = lax.fori_loop(num_unmasked, walk.num_key_tiles, functools.partial(body, is_masked=True), carry)
    strips, largest, total = carry
    divisor = jnp.where(total > 0, total, 1.0)
    logs = (largest + jnp.log2(divisor)) * (1 / LOG2_E)
    return tuple(strip / lax.broadcast_in_dim(divisor, strip.shape, [0]) for strip in strips), logs


def _store_rows(source, out, head, first_row, num_rows, first_column: int) -> None:
    """The first `num_rows` of 64 rows to any row of HBM."""
    columns = pl.ds(first_column, source.shape[1])

    @pl.when(num_rows == WARPGROUP_ROWS)
    def _():
        plgpu.copy_smem_to_gmem(source, out.at[head, pl.ds(first_row, WARPGROUP_ROWS), columns])

    for size in (32, 16, 8, 4, 2, 1):

        @pl.when((num_rows < WARPGROUP_ROWS) & (lax.bitwise_and(num_rows, i32(size)) != 0))
        def _():
            start = lax.bitwise_and(num_rows, i32(~(2 * size - 1)))  # after the larger pieces
            plgpu.copy_smem_to_gmem(source.at[pl.ds(start, size)], out.at[head, pl.ds(first_row + start, size), columns])
