"""TPU chunk attention: tiles of the flat query axis against the blocks of the sequences they belong to.

Compiled for v4 to tpu7x and interpreted; not run on hardware.

Grid: one step an *item*, the part of a chunk that falls into one tile of `query_tile` flat tokens, a dynamic number
of them. Tiles stand at fixed multiples of their size, so a chunk may start at any flat token: a tile that two chunks
share is two items in a row, each of which computes the whole tile and keeps its own rows.

    VMEM  q, out [N, query_tile, E]                   the tile, all heads
          buffers [2, blocks, K, planes, P, 128]      KV groups as in the decode kernel, one of them on its way
          peak, mass, accumulator [units, rows, ...]  online softmax in float32, base 2
          two stages of logits, weights, peak, decay  between a unit's three pieces
    SMEM  the items, this item's block table row and the next one's

A group is attended in *units*: `unit_heads` query heads of one kv head (about 256 rows) against `key_tile` keys.  A
unit is three pieces, and the pieces of three units run together, so that matrix and vector units work at the same time:

    loop over units u:    weights(u) from logits(u)    |    sum += weights(u - 1) v    |    logits(u + 1) = q k^T

Keys after the item's last query, and before its first query's window, are never fetched in whole blocks and never
computed in whole key tiles; key tiles that every query sees whole are not masked.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.batch import AttentionSpec, RaggedBatch
from pallas_kernels.paged_attention.layout import PoolLayout
from pallas_kernels.paged_attention.mosaic_tpu_decode import (
    LOG2_E,
    NEVER,
    dot,
    flat_scales,
    lane_sums,
    to_base2,
    to_matmul,
)
from pallas_kernels.paged_attention.mosaic_tpu_tiles import (
    LANES,
    TpuTiles,
    check_smem,
    check_vmem,
    chunk_vmem_bytes,
    head_lanes,
)
from pallas_kernels.paged_attention.mosaic_tpu_write import ChunkTokens, positions_of

NAME = "jserve_chunks"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChunkTiles:
    """Items of the chunk kernel in flat order; entries from `count` on are zero."""

    row: jax.Array  # i32[W], whose table
    tile: jax.Array  # i32[W]
    start: jax.Array  # i32[W], first query within the tile
    num_queries: jax.Array  # i32[W]
    position: jax.Array  # i32[W], absolute, of the first query
    count: jax.Array  # i32[]


def chunk_tiles(batch: RaggedBatch, kv_lens: jax.Array, num_tokens: int, query_tile: int) -> ChunkTiles:
    """An item starts at each chunk token that is its chunk's first or its tile's first."""
    num_rows = batch.block_tables.shape[0]
    capacity = min(num_tokens, -(-num_tokens // query_tile) + num_rows)
    tokens = ChunkTokens.of(batch, kv_lens, num_tokens)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    first, count = positions_of(tokens.is_chunk & (tokens.is_first | (token % query_tile == 0)), capacity)
    live = jnp.arange(capacity, dtype=jnp.int32) < count
    row = tokens.row[first]
    length = jnp.minimum(query_tile - first % query_tile, batch.cu_q_lens[row + 1] - first)
    keep = lambda x: jnp.where(live, x, 0).astype(jnp.int32)
    return ChunkTiles(
        row=keep(row),
        tile=keep(first // query_tile),
        start=keep(first % query_tile),
        num_queries=keep(length),
        position=keep(tokens.position[first]),
        count=count,
    )


@dataclass(frozen=True)
class _Sizes:
    """Everything static about one call."""

    layout: PoolLayout
    spec: AttentionSpec
    tiles: TpuTiles
    queries_per_kv_head: int
    matmul_dtype: jnp.dtype
    has_scales: bool

    @property
    def softmax_rows(self) -> int:
        """Rows whose logits stay in registers: 32 x 512 float32 are 16 of them.  All of one query head."""
        return min(32, self.tiles.query_tile)

    @property
    def unit_heads(self) -> int:
        return self.tiles.unit_heads(self.queries_per_kv_head)

    @property
    def units_per_key_tile(self) -> int:
        return self.layout.num_kv_heads * self.queries_per_kv_head // self.unit_heads

    @property
    def unit_rows(self) -> int:
        return self.unit_heads * self.tiles.query_tile

    @property
    def lanes(self) -> int:
        return head_lanes(self.layout)

    @property
    def group_blocks(self) -> int:
        return self.tiles.chunk_group // self.layout.block_size

    @property
    def key_tile_blocks(self) -> int:
        return self.tiles.key_tile // self.layout.block_size


@dataclass(frozen=True)
class _Stage:
    """What a unit leaves between its three pieces."""

    logits_ref: Any  # f32[unit rows, key_tile]
    weights_ref: Any  # [unit rows, key_tile] in the matmul's type
    peak_ref: Any  # f32[unit rows, 128], maximum of the logits so far
    decay_ref: Any  # f32[unit rows, 128], what the sums before this unit shrink by


def attend_chunks(
    q: jax.Array,  # [T, N, H]
    pool: jax.Array,  # [L, B, K, planes, P, 128] with the chunks' own tokens in it
    layer: jax.Array,
    tables: jax.Array,  # i32[S, 1, max_blocks]
    chunks: ChunkTiles,
    *,
    layout: PoolLayout,
    spec: AttentionSpec,
    tiles: TpuTiles,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    interpret=False,
) -> jax.Array:
    """out [T, N, H]; rows that belong to no chunk are unspecified."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, max_blocks, capacity = layout.num_kv_heads, tables.shape[2], chunks.row.shape[0]
    sizes = _Sizes(
        layout, spec, tiles, num_heads // num_kv_heads, q.dtype, k_scale is not None or v_scale is not None
    )
    units, rows, lanes, query_tile = sizes.units_per_key_tile, sizes.unit_rows, sizes.lanes, tiles.query_tile
    float32 = jnp.dtype(jnp.float32)
    buffer_shape = (2, sizes.group_blocks, num_kv_heads, layout.planes, layout.block_size, LANES)
    scratch = [
        (buffer_shape, pool.dtype),
        ((units, rows, LANES), float32),
        ((units, rows, LANES), float32),
        ((units, rows, lanes), float32),
    ] + 2 * [
        ((rows, tiles.key_tile), float32),
        ((rows, tiles.key_tile), q.dtype),
        ((rows, LANES), float32),
        ((rows, LANES), float32),
    ]
    check_smem(NAME, 5 * capacity + 2 * num_kv_heads + num_heads, max_blocks)
    vmem_limit = check_vmem(
        NAME,
        chunk_vmem_bytes(layout, tiles, sizes.queries_per_kv_head, q.dtype.itemsize),
        num_kv_heads=num_kv_heads,
        num_heads=num_heads,
        head_dim=head_dim,
        block_size=layout.block_size,
        query_tile=query_tile,
        chunk_group=tiles.chunk_group,
    )

    item_row = lambda item, layer, row, *_: (row[item], 0, 0)
    next_row = lambda item, layer, row, *_: (row[jnp.minimum(item + 1, capacity - 1)], 0, 0)
    query_spec = pl.BlockSpec((num_heads, query_tile, lanes), lambda item, layer, row, tile, *_: (0, tile[item], 0))
    num_padded = -(-num_tokens // query_tile) * query_tile
    inputs = [
        tables,
        tables,
        jnp.pad(q.transpose(1, 0, 2), ((0, 0), (0, num_padded - num_tokens), (0, lanes - head_dim))),
    ]
    in_specs = [
        pl.BlockSpec((1, 1, max_blocks), item_row, memory_space=pltpu.SMEM),
        pl.BlockSpec((1, 1, max_blocks), next_row, memory_space=pltpu.SMEM),
        query_spec,
    ]
    if sizes.has_scales:
        inputs.append(flat_scales(k_scale, v_scale, num_kv_heads))
        in_specs.append(pl.BlockSpec(memory_space=pltpu.SMEM))
    if spec.has_sinks:
        inputs.append(sinks.astype(jnp.float32) * LOG2_E)
        in_specs.append(pl.BlockSpec(memory_space=pltpu.SMEM))
    inputs.append(pool)
    in_specs.append(pl.BlockSpec(memory_space=pl.ANY))
    out = pl.pallas_call(
        functools.partial(_kernel, sizes=sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(jnp.maximum(chunks.count, 1),),  # an item of no queries does nothing
            in_specs=in_specs,
            out_specs=query_spec,
            scratch_shapes=[pltpu.VMEM(shape, dtype) for shape, dtype in scratch]
            + [pltpu.SemaphoreType.DMA((2,)), pltpu.SMEM((1,), jnp.int32)],
        ),
        out_shape=jax.ShapeDtypeStruct((num_heads, num_padded, lanes), q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem_limit, disable_bounds_checks=True
        ),
        interpret=interpret,
        name=NAME,
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        chunks.row,
        chunks.tile,
        chunks.start,
        chunks.num_queries,
        chunks.position,
        *inputs,
    )
    first_lane = LANES // 2 if layout.planes == 1 else 0  # packed: values are the upper half
    return out[:, :num_tokens, first_lane : first_lane + head_dim].transpose(1, 0, 2)


def _kernel(
    layer_ref,
    row_ref,
    tile_ref,
    start_ref,
    num_queries_ref,
    position_ref,
    table_ref,
    next_table_ref,
    q_ref,
    *refs,
    sizes: _Sizes,
):
    """refs: [scales SMEM f32[2K]], [sinks SMEM f32[N]], pool, then the output and scratch as in the call."""
    scales_ref = sinks_ref = None
    if sizes.has_scales:
        scales_ref, *refs = refs
    if sizes.spec.has_sinks:
        sinks_ref, *refs = refs
    (
        pool_ref,
        out_ref,
        buffer_ref,
        peak_ref,
        mass_ref,
        sum_ref,
        *stage_refs,
        fetch_semaphores,
        slot_ref,
    ) = refs
    stages = (_Stage(*stage_refs[:4]), _Stage(*stage_refs[4:]))
    spec, layout, tiles = sizes.spec, sizes.layout, sizes.tiles
    num_kv_heads, group_size, unit_rows = layout.num_kv_heads, sizes.queries_per_kv_head, sizes.unit_rows
    block_size, blocks, key_tile = layout.block_size, sizes.group_blocks, tiles.key_tile
    item, num_items, layer = pl.program_id(0), pl.num_programs(0), layer_ref[0]

    def first_block(item):
        """The first block that the window of the item's first query still sees."""
        if spec.sliding_window is None:
            return 0
        return jnp.maximum(position_ref[item] + 1 - spec.sliding_window, 0) // block_size

    def num_keys(item):
        """Keys before this one are seen by the item's last query; none where the item has no queries."""
        return jnp.where(num_queries_ref[item] > 0, position_ref[item] + num_queries_ref[item], 0)

    def blocks_of_group(item, group):
        return jnp.clip(pl.cdiv(num_keys(item), block_size) - first_block(item) - group * blocks, 0, blocks)

    def start_fetch(some_table_ref, item, group, slot):
        first = first_block(item) + group * blocks

        def one_block(index, _):
            block = some_table_ref[0, 0, first + index]
            pltpu.make_async_copy(
                pool_ref.at[layer, block], buffer_ref.at[slot, index], fetch_semaphores.at[slot]
            ).start()
            return 0

        lax.fori_loop(0, blocks_of_group(item, group), one_block, 0)

    def wait_fetch(group, slot):
        count = blocks_of_group(item, group)
        pltpu.make_async_copy(
            pool_ref.at[layer, pl.ds(0, count)], buffer_ref.at[slot, pl.ds(0, count)], fetch_semaphores.at[slot]
        ).wait()

    @pl.when(item == 0)
    def _():
        slot_ref[0] = 0
        start_fetch(table_ref, 0, 0, 0)

    first_slot = slot_ref[0]
    start, num_queries, position = start_ref[item], num_queries_ref[item], position_ref[item]
    end = num_keys(item)
    num_groups = pl.cdiv(pl.cdiv(end, block_size) - first_block(item), blocks)

    def clean_tail(slot, first_key, num_key_tiles):
        """Zero values that the last key tile holds beyond the last key: they may be NaN, and 0 * NaN is NaN."""

        def one_block(index, _):
            key = first_key + index * block_size + lax.broadcasted_iota(jnp.int32, (block_size, LANES), 0)
            for head in range(num_kv_heads):
                for plane in range(layout.planes // 2, layout.planes):
                    values = buffer_ref[slot, index, head, plane]
                    cleaned = jnp.where(key < end, values.astype(jnp.float32), 0.0)
                    buffer_ref[slot, index, head, plane] = cleaned.astype(values.dtype)
            return 0

        lax.fori_loop((end - first_key) // block_size, num_key_tiles * sizes.key_tile_blocks, one_block, 0)

    def kv_planes(unit, slot, indices):
        """[key_tile, lanes]: keys or values of the unit's head and key tile."""
        blocks = pl.ds(unit // sizes.units_per_key_tile * sizes.key_tile_blocks, sizes.key_tile_blocks)
        head = unit % sizes.units_per_key_tile * sizes.unit_heads // group_size
        columns = [
            to_matmul(buffer_ref[slot, blocks, head, index].reshape(key_tile, LANES), sizes.matmul_dtype)
            for index in indices
        ]
        return columns[0] if len(columns) == 1 else jnp.concatenate(columns, -1)

    def logits_of(unit, slot, first_key, stage: "_Stage", masked):
        """Logits of a unit, and what they make of the running maximum."""
        part = unit % sizes.units_per_key_tile
        first_head = part * sizes.unit_heads
        q = q_ref[pl.ds(first_head, sizes.unit_heads)].reshape(unit_rows, sizes.lanes)
        dots = dot(q, kv_planes(unit, slot, range(max(1, layout.planes // 2))), 1)
        key_scale = None if scales_ref is None else scales_ref[first_head // group_size]
        for row in range(0, unit_rows, sizes.softmax_rows):
            some = pl.ds(row, sizes.softmax_rows)
            logits = to_base2(dots[row : row + sizes.softmax_rows], spec, key_scale)
            if masked:
                query = lax.broadcasted_iota(jnp.int32, logits.shape, 0) + (position - start + row % tiles.query_tile)
                key = lax.broadcasted_iota(jnp.int32, logits.shape, 1) + first_key
                mask = key <= query
                if spec.sliding_window is not None:
                    mask &= key > query - spec.sliding_window
                logits = jnp.where(mask, logits, NEVER)
            stage.logits_ref[some] = logits
            peak = peak_ref[part, some]
            new_peak = jnp.maximum(peak, logits.max(-1, keepdims=True))
            peak_ref[part, some] = new_peak
            stage.peak_ref[some] = new_peak
            stage.decay_ref[some] = jnp.exp2(peak - new_peak)

    def weights_of(unit, stage: "_Stage"):
        part = unit % sizes.units_per_key_tile
        for row in range(0, unit_rows, sizes.softmax_rows):
            some = pl.ds(row, sizes.softmax_rows)
            weights = jnp.exp2(stage.logits_ref[some] - stage.peak_ref[some][:, :1])
            mass_ref[part, some] = mass_ref[part, some] * stage.decay_ref[some] + lane_sums(weights)
            stage.weights_ref[some] = weights.astype(stage.weights_ref.dtype)

    def add_values(unit, slot, stage: "_Stage"):
        part = unit % sizes.units_per_key_tile
        update = dot(stage.weights_ref[...], kv_planes(unit, slot, range(layout.planes // 2, layout.planes)), 0)
        for lane in range(0, sizes.lanes, LANES):
            columns = pl.ds(lane, LANES)
            sum_ref[part, :, columns] = (
                sum_ref[part, :, columns] * stage.decay_ref[...] + update[:, lane : lane + LANES]
            )

    def attend_group(slot, first_key, num_key_tiles):
        num_units = num_key_tiles * sizes.units_per_key_tile

        def tile_of(unit):
            """(the unit's first key, whether some query does not see all of its keys)"""
            tile_key = first_key + unit // sizes.units_per_key_tile * key_tile
            partial = tile_key + key_tile - 1 > position
            if spec.sliding_window is not None:
                partial |= tile_key <= position + num_queries - 1 - spec.sliding_window
            return tile_key, partial

        tile_key, partial = tile_of(0)
        for masked in (False, True):
            pl.when(partial == masked)(functools.partial(logits_of, 0, slot, tile_key, stages[0], masked))
        # The first unit has none before it: add nothing.
        stages[1].weights_ref[...] = jnp.zeros_like(stages[1].weights_ref)
        stages[1].decay_ref[...] = jnp.ones_like(stages[1].decay_ref)

        def one_unit(unit, _):
            after = unit + 1
            tile_key, partial = tile_of(after)

            # Three independent pieces for the scheduler to interleave; blocks of their own by parity, so that what one
            # unit leaves in scratch is read by another block and not kept in registers meanwhile.
            def three_units(parity, masked):
                this, other = stages[parity], stages[1 - parity]
                weights_of(unit, this)
                add_values(jnp.maximum(unit - 1, 0), slot, other)
                logits = functools.partial(logits_of, after, slot, tile_key, other, masked)
                if masked:  # in a block of its own, or the masks push other values out of the registers
                    pl.when(unit >= 0)(logits)
                else:
                    logits()

            for parity in (0, 1):
                for masked in (False, True):
                    pl.when((unit % 2 == parity) & (partial == masked))(functools.partial(three_units, parity, masked))
            return 0

        lax.fori_loop(0, num_units - 1, one_unit, 0)
        for parity in (0, 1):

            @pl.when(num_units % 2 != parity)
            def _():
                add_values(jnp.maximum(num_units - 2, 0), slot, stages[1 - parity])
                weights_of(num_units - 1, stages[parity])
                add_values(num_units - 1, slot, stages[parity])

    def one_group(group, _):
        slot = (first_slot + group) % 2

        @pl.when(group + 1 < num_groups)
        def _():
            start_fetch(table_ref, item, group + 1, 1 - slot)

        @pl.when((group + 1 == num_groups) & (item + 1 < num_items))
        def _():
            start_fetch(next_table_ref, item + 1, 0, 1 - slot)

        wait_fetch(group, slot)
        first_key = (first_block(item) + group * blocks) * block_size
        num_key_tiles = pl.cdiv(jnp.minimum(end - first_key, blocks * block_size), key_tile)

        @pl.when(group + 1 == num_groups)
        def _():
            clean_tail(slot, first_key, num_key_tiles)

        attend_group(slot, first_key, num_key_tiles)
        return 0

    @pl.when(num_queries > 0)
    def _():
        sum_ref[...] = jnp.zeros_like(sum_ref)
        if sinks_ref is None:
            peak_ref[...] = jnp.full_like(peak_ref, NEVER)
            mass_ref[...] = jnp.zeros_like(mass_ref)
        else:  # a sink is one more logit: it starts the softmax with mass 1
            first_lane = lax.broadcasted_iota(jnp.int32, mass_ref.shape, 2) == 0
            mass_ref[...] = first_lane.astype(jnp.float32)
            for head in range(num_kv_heads * group_size):
                rows = pl.ds(head % sizes.unit_heads * tiles.query_tile, tiles.query_tile)
                peak_ref[head // sizes.unit_heads, rows] = jnp.full((tiles.query_tile, LANES), sinks_ref[head])
        lax.fori_loop(0, num_groups, one_group, 0)
        slot_ref[0] = (first_slot + num_groups) % 2
        is_first_of_tile = (item == 0) | (tile_ref[jnp.maximum(item - 1, 0)] != tile_ref[item])

        def one_part(part, _):
            out = sum_ref[part] / mass_ref[part].sum(-1, keepdims=True)
            first_head = part * sizes.unit_heads
            if scales_ref is not None:
                out = out * scales_ref[num_kv_heads + first_head // group_size]
            out = out.reshape(sizes.unit_heads, tiles.query_tile, sizes.lanes)
            some = pl.ds(first_head, sizes.unit_heads)
            query = lax.broadcasted_iota(jnp.int32, out.shape, 1)
            own = (query >= start) & (query < start + num_queries)
            others = jnp.where(is_first_of_tile, 0.0, out_ref[some].astype(jnp.float32))
            out_ref[some] = jnp.where(own, out, others).astype(out_ref.dtype)
            return 0

        lax.fori_loop(0, sizes.units_per_key_tile, one_part, 0)
