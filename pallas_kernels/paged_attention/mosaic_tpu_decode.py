"""TPU decode attention: one new token a row; its key and value are written into the pool in the same call.

Compiled for v4 to tpu7x and interpreted; not run on hardware.

Grid: one step a row (sequence), a dynamic number of them.  A row's blocks come in groups of `decode_group` tokens:

    VMEM  buffers [2, blocks, K, planes, P, 128]   group g in slot g % 2 while the next, or the next row's first, comes
          q [pairs, R, E]                          a *pair* is the kv heads of one matmul: R = heads_per_matmul * G
                                                   query rows, block-diagonal over E lanes
          peak, mass, accumulator [pairs, R, ...]  online softmax in float32, base 2: exp(x) = exp2(x * log2(e))
    SMEM  row_lens, this row's block table and the next one's: two rows of the table, whose size is HBM's

Order in a group: start the next fetch, wait for this one, (last group: zero what lies beyond the last token, put the
new token into its block, start its write), QK of all pairs, softmax of all pairs, PV of all pairs, (last group: wait
for the write).  Only the first group under a window and the last group are masked, and attended in pieces of `decode_tail`
tokens, as many as the row needs; the others are whole.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.batch import AttentionSpec
from pallas_kernels.paged_attention.layout import PoolLayout
from pallas_kernels.paged_attention.mosaic_tpu_tiles import (
    LANES,
    TpuTiles,
    check_smem,
    check_vmem,
    decode_vmem_bytes,
    head_lanes,
)

NEVER = -1e30  # a masked logit: finite, so that a row with no visible key stays finite
LOG2_E = math.log2(math.e)
NAME = "jserve_decode"


@dataclass(frozen=True)
class _Sizes:
    """Everything static about one call."""

    layout: PoolLayout
    spec: AttentionSpec
    queries_per_kv_head: int
    tiles: TpuTiles
    matmul_dtype: jnp.dtype
    has_scales: bool

    @property
    def heads_per_matmul(self) -> int:
        return self.tiles.heads_per_matmul

    @property
    def group_tokens(self) -> int:
        return self.tiles.decode_group

    @property
    def group_blocks(self) -> int:
        return self.group_tokens // self.layout.block_size

    @property
    def num_pairs(self) -> int:
        return self.layout.num_kv_heads // self.heads_per_matmul

    @property
    def rows(self) -> int:
        return self.heads_per_matmul * self.queries_per_kv_head

    @property
    def key_planes(self) -> range:
        return range(max(1, self.layout.planes // 2))

    @property
    def value_planes(self) -> range:
        return range(self.layout.planes // 2, self.layout.planes)

    @property
    def head_lanes(self) -> int:
        """Lanes of one head's q and of its output."""
        return head_lanes(self.layout)

    @property
    def tail_tokens(self) -> int:
        return self.tiles.decode_tail

    @property
    def write_rows(self) -> int:
        """Rows rewritten around a new token: one packed tile of the pool's type, which a DMA can address."""
        return min(self.layout.block_size, 32 // self.layout.dtype.itemsize)


def decode_attention(
    q: jax.Array,  # [S, N, H]
    new: jax.Array,  # [S, K, planes, 128] in the pool's type: this step's key and value of each row
    pool: jax.Array,  # [L, B, K, planes, P, 128], donated
    layer: jax.Array,  # i32[]
    tables: jax.Array,  # i32[S, 1, max_blocks]
    row_lens: jax.Array,  # i32[S]: tokens including the new one; 0 = not a decode, skipped
    num_rows: jax.Array,  # i32[]: rows from here on are skipped
    *,
    layout: PoolLayout,
    spec: AttentionSpec,
    tiles: TpuTiles,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    interpret=False,
) -> tuple[jax.Array, jax.Array]:
    """(out [S, N, H], pool).  Rows of `out` with no length are zero below num_rows and unspecified from there on."""
    num_sequences, num_heads, head_dim = q.shape
    sizes = _Sizes(
        layout=layout,
        spec=spec,
        queries_per_kv_head=num_heads // layout.num_kv_heads,
        tiles=tiles,
        matmul_dtype=q.dtype,
        has_scales=k_scale is not None or v_scale is not None,
    )
    pairs, rows, lanes = sizes.num_pairs, sizes.rows, sizes.head_lanes
    max_blocks = tables.shape[2]
    buffer_shape = (sizes.group_blocks, layout.num_kv_heads, layout.planes, layout.block_size, LANES)
    check_smem(NAME, num_sequences + 2 * layout.num_kv_heads, max_blocks)
    vmem_limit = check_vmem(
        NAME,
        decode_vmem_bytes(layout, tiles, sizes.queries_per_kv_head, q.dtype.itemsize),
        num_kv_heads=layout.num_kv_heads,
        num_heads=num_heads,
        head_dim=head_dim,
        block_size=layout.block_size,
        decode_group=sizes.group_tokens,
    )

    one_row = lambda row, *_: (row, 0, 0)
    next_row = lambda row, *_: (jnp.minimum(row + 1, num_sequences - 1), 0, 0)
    per_row = lambda *shape: pl.BlockSpec((1, *shape), lambda row, *_: (row,) + (0,) * len(shape))
    inputs = [tables, tables, _block_diagonal(q, sizes), new]
    in_specs = [
        pl.BlockSpec((1, 1, max_blocks), one_row, memory_space=pltpu.SMEM),
        pl.BlockSpec((1, 1, max_blocks), next_row, memory_space=pltpu.SMEM),
        per_row(pairs, rows, sizes.heads_per_matmul * lanes),
        per_row(layout.num_kv_heads, layout.planes, LANES),
    ]
    if sizes.has_scales:
        inputs.append(flat_scales(k_scale, v_scale, layout.num_kv_heads))
        in_specs.append(pl.BlockSpec(memory_space=pltpu.SMEM))
    if spec.has_sinks:
        sink_rows = (sinks.astype(jnp.float32) * LOG2_E).reshape(pairs, rows, 1)
        inputs.append(jnp.broadcast_to(sink_rows, (pairs, rows, LANES)))
        in_specs.append(pl.BlockSpec((pairs, rows, LANES), lambda row, *_: (0, 0, 0)))
    inputs.append(pool)
    in_specs.append(pl.BlockSpec(memory_space=pl.ANY))

    out, pool = pl.pallas_call(
        functools.partial(_kernel, sizes=sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(jnp.maximum(num_rows, 1),),  # row 0 of an empty batch has no length: a grid step that does nothing
            in_specs=in_specs,
            out_specs=[per_row(pairs, rows, lanes), pl.BlockSpec(memory_space=pl.ANY)],
            scratch_shapes=[
                pltpu.VMEM((2, *buffer_shape), pool.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA,
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((pairs, rows, LANES), jnp.float32),
                pltpu.VMEM((pairs, rows, LANES), jnp.float32),
                pltpu.VMEM((pairs, rows, lanes), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((num_sequences, pairs, rows, lanes), q.dtype),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ],
        input_output_aliases={2 + len(inputs) - 1: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            has_side_effects=True,
            vmem_limit_bytes=vmem_limit,
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name=NAME,
    )(jnp.asarray(layer, jnp.int32).reshape(1), row_lens, *inputs)
    out = out.reshape(num_sequences, num_heads, lanes)
    first_lane = LANES // 2 if layout.planes == 1 else 0  # packed: values are the upper half
    return out[..., first_lane : first_lane + head_dim], pool


def flat_scales(k_scale, v_scale, num_kv_heads: int) -> jax.Array:
    """f32[2K]: the key scales of all kv heads, then the value scales; 1 where there is none."""
    one = jnp.ones((), jnp.float32)
    return jnp.concatenate(
        [
            jnp.broadcast_to(one if scale is None else jnp.asarray(scale, jnp.float32).reshape(-1), (num_kv_heads,))
            for scale in (k_scale, v_scale)
        ]
    )


def _block_diagonal(q: jax.Array, sizes: _Sizes) -> jax.Array:
    """[S, N, H] -> [S, pairs, R, heads_per_matmul * lanes]: head e in rows e*G.. and lanes e*lanes.., else 0."""
    num_sequences, _, head_dim = q.shape
    heads, lanes = sizes.heads_per_matmul, sizes.head_lanes
    q = jnp.pad(q, ((0, 0), (0, 0), (0, lanes - head_dim)))
    q = q.reshape(num_sequences, sizes.num_pairs, heads, sizes.queries_per_kv_head, 1, lanes)
    if heads > 1:
        q = q * jnp.eye(heads, dtype=q.dtype)[:, None, :, None]
    return q.reshape(num_sequences, sizes.num_pairs, sizes.rows, heads * lanes)


def _kernel(layer_ref, row_lens_ref, table_ref, next_table_ref, q_ref, new_ref, *refs, sizes: _Sizes):
    """refs: [scales SMEM f32[2K]], [sinks f32[pairs, R, 128]], pool, then outputs and scratch as in the call."""
    scales_ref = sinks_ref = None
    if sizes.has_scales:
        scales_ref, *refs = refs
    if sizes.spec.has_sinks:
        sinks_ref, *refs = refs
    _, out_ref, pool_ref, buffer_ref, fetch_semaphores, write_semaphore, slot_ref, peak_ref, mass_ref, sum_ref = refs

    spec, layout = sizes.spec, sizes.layout
    block_size, blocks, tokens = layout.block_size, sizes.group_blocks, sizes.group_tokens
    pairs, heads = range(sizes.num_pairs), sizes.heads_per_matmul
    row, num_rows, layer = pl.program_id(0), pl.num_programs(0), layer_ref[0]
    length = row_lens_ref[row]

    def first_block(row_length):
        """The first block that a window still sees."""
        if spec.sliding_window is None:
            return 0
        return jnp.maximum(row_length - spec.sliding_window, 0) // block_size

    def blocks_of_group(row_length, group):
        return jnp.clip(pl.cdiv(row_length, block_size) - first_block(row_length) - group * blocks, 0, blocks)

    def start_fetch(some_table_ref, row_length, group, slot):
        first = first_block(row_length) + group * blocks

        def one_block(index, _):
            block = some_table_ref[0, 0, first + index]
            pltpu.make_async_copy(
                pool_ref.at[layer, block], buffer_ref.at[slot, index], fetch_semaphores.at[slot]
            ).start()
            return 0

        lax.fori_loop(0, blocks_of_group(row_length, group), one_block, 0)

    def wait_fetch(group, slot):
        """One wait for the bytes of all the group's blocks; which blocks the descriptor names does not matter."""
        count = blocks_of_group(length, group)
        pltpu.make_async_copy(
            pool_ref.at[layer, pl.ds(0, count)], buffer_ref.at[slot, pl.ds(0, count)], fetch_semaphores.at[slot]
        ).wait()

    def start_next_row(slot):
        @pl.when(row + 1 < num_rows)
        def _():
            start_fetch(next_table_ref, row_lens_ref[row + 1], 0, slot)

    @pl.when(row == 0)
    def _():
        slot_ref[0] = 0
        start_fetch(table_ref, length, 0, 0)

    first_slot = slot_ref[0]
    num_groups = pl.cdiv(pl.cdiv(length, block_size) - first_block(length), blocks)

    def attend(slot, first_index, num_tokens, first_token, masked):
        """The row's query against `num_tokens` (static) of a group, from its block `first_index` on."""

        def plane(head, index):
            blocks = pl.ds(first_index, num_tokens // block_size)
            return to_matmul(buffer_ref[slot, blocks, head, index].reshape(num_tokens, LANES), sizes.matmul_dtype)

        def side_by_side(planes):
            return planes[0] if len(planes) == 1 else jnp.concatenate(planes, -1)

        logits = []
        for pair in pairs:
            keys = side_by_side([plane(pair * heads + e, c) for e in range(heads) for c in sizes.key_planes])
            logits.append(dot(q_ref[0, pair], keys, 1))
        logits = [to_base2(x, spec, _key_scale(scales_ref, pair, sizes)) for pair, x in zip(pairs, logits)]
        if masked:
            logits = [jnp.where(visible(x.shape, first_token), x, NEVER) for x in logits]
        peaks = [peak_ref[pair] for pair in pairs]
        new_peaks = [jnp.maximum(peak, x.max(-1, keepdims=True)) for peak, x in zip(peaks, logits)]
        weights = [jnp.exp2(x - peak[:, :1]) for x, peak in zip(logits, new_peaks)]
        decays = [jnp.exp2(old - new) for old, new in zip(peaks, new_peaks)]
        for pair in pairs:
            peak_ref[pair] = new_peaks[pair]
            mass_ref[pair] = mass_ref[pair] * decays[pair] + lane_sums(weights[pair])
        for pair in pairs:
            values = side_by_side([plane(pair * heads + e, c) for e in range(heads) for c in sizes.value_planes])
            both = dot(weights[pair].astype(sizes.matmul_dtype), values, 0)
            width = both.shape[1] // heads
            own = both[:, :width]
            if heads > 1:  # row e*G.. wants the lanes of head e
                rows = lax.broadcasted_iota(jnp.int32, own.shape, 0)
                for e in range(1, heads):
                    own = jnp.where(rows < e * sizes.queries_per_kv_head, own, both[:, e * width : (e + 1) * width])
            decay = decays[pair] if width == LANES else decays[pair][:, :1]
            sum_ref[pair] = sum_ref[pair] * decay + own

    def first_token_of(group):
        return (first_block(length) + group * blocks) * block_size

    def visible(shape, first_token):
        """Which tokens along axis 1 the row's query sees."""
        position = first_token + lax.broadcasted_iota(jnp.int32, shape, 1)
        mask = position < length
        if spec.sliding_window is not None:
            mask &= position >= length - spec.sliding_window
        return mask

    def attend_masked(group, slot):
        """Piece by piece, so that a short tail costs less than a whole group."""
        first_token = first_token_of(group)

        def one_piece(piece, _):
            first_index = piece * (sizes.tail_tokens // block_size)
            attend(slot, first_index, sizes.tail_tokens, first_token + piece * sizes.tail_tokens, masked=True)
            return 0

        num_tokens = jnp.minimum(length - first_token, tokens)
        lax.fori_loop(0, pl.cdiv(num_tokens, sizes.tail_tokens), one_piece, 0)

    def start_middle_group(group):
        slot = (first_slot + group) % 2
        start_fetch(table_ref, length, group + 1, 1 - slot)
        wait_fetch(group, slot)
        return slot

    def middle_group(group, _):
        attend(start_middle_group(group), 0, tokens, first_token_of(group), masked=False)
        return 0

    def clean_tail(slot):
        """Zero values in the last piece beyond the last token: they may be NaN, and 0 * NaN is NaN."""
        num_tokens = length - first_token_of(num_groups - 1)
        first_unused = num_tokens // block_size
        value_planes = [(head, plane) for head in range(layout.num_kv_heads) for plane in sizes.value_planes]

        @pl.when(num_tokens % block_size > 0)
        def _():
            row = lax.broadcasted_iota(jnp.int32, (block_size, LANES), 0)
            for head, plane in value_planes:
                values = buffer_ref[slot, first_unused, head, plane]
                kept = jnp.where(row < num_tokens % block_size, values.astype(jnp.float32), 0.0)
                buffer_ref[slot, first_unused, head, plane] = kept.astype(values.dtype)

        def zero_block(index, _):
            for head, plane in value_planes:
                buffer_ref[slot, index, head, plane] = jnp.zeros((block_size, LANES), buffer_ref.dtype)
            return 0

        end = pl.cdiv(num_tokens, sizes.tail_tokens) * (sizes.tail_tokens // block_size)
        lax.fori_loop(pl.cdiv(num_tokens, block_size), end, zero_block, 0)

    def last_group():
        group = num_groups - 1
        slot = (first_slot + group) % 2
        start_next_row(1 - slot)
        wait_fetch(group, slot)
        clean_tail(slot)  # before the write, which reads the same rows
        position = length - 1
        index = position // block_size - first_block(length) - group * blocks
        offset = position % block_size
        first_row = pl.multiple_of(offset // sizes.write_rows * sizes.write_rows, sizes.write_rows)
        tile_ref = buffer_ref.at[slot, index, :, :, pl.ds(first_row, sizes.write_rows), :]
        tile = tile_ref[...]
        # 8-bit types have no select of their own.
        select_type = jnp.float32 if tile.dtype.itemsize < 2 else tile.dtype
        is_new = lax.broadcasted_iota(jnp.int32, tile.shape, 2) == offset - first_row
        new_token = new_ref[0].astype(select_type)[:, :, None, :]
        tile_ref[...] = jnp.where(is_new, new_token, tile.astype(select_type)).astype(tile.dtype)
        block = table_ref[0, 0, position // block_size]
        write = pltpu.make_async_copy(
            tile_ref, pool_ref.at[layer, block, :, :, pl.ds(first_row, sizes.write_rows), :], write_semaphore
        )
        write.start()
        attend_masked(group, slot)
        write.wait()

    @pl.when(length > 0)
    def _():
        sum_ref[...] = jnp.zeros_like(sum_ref)
        if sinks_ref is None:
            peak_ref[...] = jnp.full_like(peak_ref, NEVER)
            mass_ref[...] = jnp.zeros_like(mass_ref)
        else:  # a sink is one more logit: it starts the softmax with mass 1
            peak_ref[...] = sinks_ref[...]
            mass_ref[...] = (lax.broadcasted_iota(jnp.int32, mass_ref.shape, 2) == 0).astype(jnp.float32)
        first_whole = 0
        if spec.sliding_window is not None:
            first_whole = 1

            @pl.when(num_groups > 1)
            def _():
                attend_masked(0, start_middle_group(0))

        lax.fori_loop(first_whole, num_groups - 1, middle_group, 0)
        last_group()
        slot_ref[0] = (first_slot + num_groups) % 2
        mass = mass_ref[...].sum(-1, keepdims=True)
        for pair in pairs:
            out = sum_ref[pair] / mass[pair]
            if scales_ref is not None:
                out = out * _row_scale(scales_ref, layout.num_kv_heads + pair * heads, sizes)
            out_ref[0, pair] = out.astype(out_ref.dtype)

    @pl.when(length == 0)
    def _():
        start_next_row(first_slot)
        out_ref[...] = jnp.zeros_like(out_ref)


def to_matmul(values: jax.Array, dtype) -> jax.Array:
    if values.dtype == dtype:
        return values
    if jnp.issubdtype(values.dtype, jnp.integer):  # Mosaic converts int8 to bfloat16 by way of float32
        return values.astype(jnp.float32).astype(dtype)
    return values.astype(dtype)


def dot(left: jax.Array, right: jax.Array, right_axis: int) -> jax.Array:
    """left [M, C] times right, contracted over `right_axis`, in float32.  Float32 operands keep their precision."""
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return lax.dot_general(
        left, right, (((1,), (right_axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def to_base2(dots: jax.Array, spec: AttentionSpec, key_scale) -> jax.Array:
    """q.k -> capped logit * log2(e)."""
    factor = spec.scale if spec.soft_cap is not None else spec.scale * LOG2_E
    logits = dots * (factor if key_scale is None else factor * key_scale)
    if spec.soft_cap is not None:
        logits = jnp.tanh(logits * (1 / spec.soft_cap)) * (spec.soft_cap * LOG2_E)
    return logits


def lane_sums(weights: jax.Array) -> jax.Array:
    """[R, n * 128] -> [R, 128]: sums lane by lane, so that only the end of a row needs a sum across lanes."""
    total = weights[:, :LANES]
    for start in range(LANES, weights.shape[1], LANES):
        total = total + weights[:, start : start + LANES]
    return total


def _key_scale(scales_ref, pair: int, sizes: _Sizes):
    return None if scales_ref is None else _row_scale(scales_ref, pair * sizes.heads_per_matmul, sizes)


def _row_scale(scales_ref, first: int, sizes: _Sizes) -> jax.Array:
    """[R, 1]: scales_ref[first + e] in the rows of head e."""
    rows = lax.broadcasted_iota(jnp.int32, (sizes.rows, 1), 0)
    scale = jnp.full((sizes.rows, 1), scales_ref[first], jnp.float32)
    for e in range(1, sizes.heads_per_matmul):
        scale = jnp.where(rows < e * sizes.queries_per_kv_head, scale, scales_ref[first + e])
    return scale
