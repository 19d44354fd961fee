"""TPU chunk write: the new keys and values of all chunks go into their blocks, whatever flat token a chunk starts at
and whatever row of a block it starts in.

Compiled for v4 to tpu7x and interpreted; not run on hardware.

Grid: one step a *write*, the part of a chunk that falls into one block: (block, first row in it, first flat token,
count). Step w brings the flat tokens from the tile boundary before its first, and the block where a part of it stays
as it is; rolls the tokens to their rows; sends the block back.  While it works the next write's inputs are on their
way, and its own result leaves while the next one works (two slots).  No two writes share a block, so their order does
not matter.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.batch import RaggedBatch
from pallas_kernels.paged_attention.layout import PoolLayout
from pallas_kernels.paged_attention.mosaic_tpu_tiles import LANES, check_smem, check_vmem, padded_bytes

NAME = "jserve_write"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChunkWrites:
    """Work of the write kernel; entries from `count` on are zero."""

    block: jax.Array  # i32[W]
    first_row: jax.Array  # i32[W]
    first_token: jax.Array  # i32[W], on the flat axis
    num_tokens: jax.Array  # i32[W]
    count: jax.Array  # i32[]


def chunk_writes(batch: RaggedBatch, kv_lens: jax.Array, num_tokens: int, layout: PoolLayout) -> ChunkWrites:
    """A write starts at each chunk token that is its chunk's first or its block's first."""
    num_rows, max_blocks = batch.block_tables.shape
    block_size = layout.block_size
    # n tokens touch at most ceil(n / P) + 1 blocks.
    capacity = min(num_tokens, -(-num_tokens // block_size) + 2 * num_rows)
    tokens = ChunkTokens.of(batch, kv_lens, num_tokens)
    starts = tokens.is_chunk & (tokens.is_first | (tokens.position % block_size == 0))
    first, count = positions_of(starts, capacity)
    live = jnp.arange(capacity, dtype=jnp.int32) < count
    row, position = tokens.row[first], tokens.position[first]
    length = jnp.minimum(block_size - position % block_size, batch.cu_q_lens[row + 1] - first)
    block = batch.block_tables[row, jnp.clip(position // block_size, 0, max_blocks - 1)]
    keep = lambda x: jnp.where(live, x, 0).astype(jnp.int32)
    return ChunkWrites(keep(block), keep(position % block_size), keep(first), keep(length), count)


@dataclass(frozen=True)
class ChunkTokens:
    """Per flat token: whether it belongs to a chunk, which row's, at which absolute position."""

    is_chunk: jax.Array  # bool[T]
    is_first: jax.Array  # bool[T], of its row
    row: jax.Array  # i32[T]
    position: jax.Array  # i32[T]

    @classmethod
    def of(cls, batch: RaggedBatch, kv_lens: jax.Array, num_tokens: int) -> "ChunkTokens":
        token = jnp.arange(num_tokens, dtype=jnp.int32)
        ends = batch.cu_q_lens[1:]
        row = jnp.searchsorted(ends, token, side="right").astype(jnp.int32)
        inside = row < ends.shape[0]
        row = jnp.where(inside, row, 0)
        position = kv_lens[row] - ends[row] + token
        is_chunk = inside & (row >= batch.num_decodes) & (kv_lens[row] > 0)
        return cls(is_chunk, token == batch.cu_q_lens[row], row, position)


def positions_of(mask: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """(i32[capacity] where `mask` is set, in order, then zeros; how many)."""
    return jnp.nonzero(mask, size=capacity, fill_value=0)[0].astype(jnp.int32), mask.sum(dtype=jnp.int32)


def write_chunks(
    new: jax.Array,  # [T, K, planes, 128] in the pool's type
    pool: jax.Array,  # [L, B, K, planes, P, 128], donated
    layer: jax.Array,
    writes: ChunkWrites,
    *,
    layout: PoolLayout,
    interpret=False,
) -> jax.Array:
    """The pool with the chunks' tokens in it."""
    capacity = writes.block.shape[0]
    tile = 8 * 4 // pool.dtype.itemsize  # tokens in one packed tile, where a DMA may start
    source_rows = layout.block_size + tile
    block_shape = (layout.num_kv_heads, layout.planes, layout.block_size, LANES)
    source_shape = (layout.num_kv_heads, layout.planes, source_rows, LANES)
    check_smem(NAME, 4 * capacity, 0)
    vmem_limit = check_vmem(
        NAME,
        2 * padded_bytes(source_shape, pool.dtype.itemsize) + 4 * padded_bytes(block_shape, pool.dtype.itemsize),
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
    )
    # Head-major like the pool, and long enough for the last write's whole window.
    source = jnp.pad(new.transpose(1, 2, 0, 3), ((0, 0), (0, 0), (0, source_rows + tile - new.shape[0] % tile), (0, 0)))
    return pl.pallas_call(
        functools.partial(_kernel, layout=layout, tile=tile),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(jnp.maximum(writes.count, 1),),  # a write of no tokens does nothing
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.VMEM((2, *source_shape), pool.dtype),
                pltpu.VMEM((2, *block_shape), pool.dtype),
                pltpu.VMEM((2, *block_shape), pool.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        input_output_aliases={7: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            has_side_effects=True,
            vmem_limit_bytes=vmem_limit,
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name=NAME,
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        writes.block,
        writes.first_row,
        writes.first_token,
        writes.num_tokens,
        writes.count.reshape(1),
        source,
        pool,
    )


def _kernel(
    layer_ref,
    block_ref,
    first_row_ref,
    first_token_ref,
    num_tokens_ref,
    count_ref,
    source_hbm,
    _pool_in,
    pool_ref,
    source_ref,
    old_ref,
    written_ref,
    source_semaphores,
    old_semaphores,
    write_semaphores,
    *,
    layout: PoolLayout,
    tile: int,
):
    step, count, layer = pl.program_id(0), count_ref[0], layer_ref[0]
    slot = step % 2
    source_rows, block_size = source_ref.shape[3], layout.block_size

    def source_copy(write, slot):
        start = pl.multiple_of(first_token_ref[write] // tile * tile, tile)
        return pltpu.make_async_copy(
            source_hbm.at[:, :, pl.ds(start, source_rows), :], source_ref.at[slot], source_semaphores.at[slot]
        )

    def old_copy(write, slot):
        return pltpu.make_async_copy(
            pool_ref.at[layer, block_ref[write]], old_ref.at[slot], old_semaphores.at[slot]
        )

    def write_copy(write, slot):
        return pltpu.make_async_copy(
            written_ref.at[slot], pool_ref.at[layer, block_ref[write]], write_semaphores.at[slot]
        )

    def start_inputs(write, slot):
        source_copy(write, slot).start()

        @pl.when(num_tokens_ref[write] < block_size)
        def _():
            old_copy(write, slot).start()

    @pl.when((step == 0) & (count > 0))
    def _():
        start_inputs(0, 0)

    @pl.when(step + 1 < count)
    def _():
        start_inputs(step + 1, 1 - slot)

    @pl.when((step >= 2) & (step < count))
    def _():
        write_copy(step - 2, slot).wait()

    @pl.when(step < count)
    def _():
        first_row, num_tokens = first_row_ref[step], num_tokens_ref[step]
        source_copy(step, slot).wait()

        @pl.when(num_tokens < block_size)
        def _():
            old_copy(step, slot).wait()

        # Row i of the window is flat token start + i; the first token must come to first_row.
        shift = first_row - first_token_ref[step] % tile
        shift = jnp.where(shift < 0, shift + source_rows, shift)

        def one_head(head, _):
            for plane in range(layout.planes):
                rows = source_ref[slot, head, plane].astype(jnp.float32)  # rotation works on 32-bit rows
                rows = pltpu.roll(rows, shift, 0)[:block_size]
                row = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
                is_new = (row >= first_row) & (row < first_row + num_tokens)
                old = old_ref[slot, head, plane].astype(jnp.float32)
                written_ref[slot, head, plane] = jnp.where(is_new, rows, old).astype(written_ref.dtype)
            return 0

        lax.fori_loop(0, layout.num_kv_heads, one_head, 0)
        write_copy(step, slot).start()

    @pl.when(step + 1 == count)
    def _():
        write_copy(step, slot).wait()

        @pl.when(step >= 1)
        def _():
            write_copy(step - 1, 1 - slot).wait()
