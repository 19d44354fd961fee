"""What the GPU kernels share: compiler parameters, shared-memory buffers, steps that jax versions spell differently.

`interpreted` kernels (GPU interpreter on CPU) replace wgmma and layout casts, for which jax 0.10's interpreter has no
rule, by plain reads of the same buffers: a read before its data has arrived then shows, and the race detector sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu_step import LOG2_E, MASKED

# Warpgroup semantics refuse what lane semantics would silently compile to wrong data: a TMA copy into tiled shared memory
# whose start row is not known to be a multiple of 8.
COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
WARPGROUP_ROWS = 64
"""Rows of one wgmma."""
NARROW_COLUMNS = 64
"""Bytes of swizzle of 8-bit tiles, whose columns are widened in parts: few registers are needed."""
BEFORE_0_11 = tuple(int(x) for x in jax.__version__.split(".")[:2]) < (0, 11)


def strip_sizes(lanes: int, largest: int) -> tuple[int, ...]:
    return tuple(min(largest, lanes - first) for first in range(0, lanes, largest))


def columns_of(strips: Sequence[jax.Array], first: int, columns: int) -> jax.Array:
    """Columns of what lies in `strips` side by side."""
    for strip in strips:
        if first < strip.shape[1]:
            return strip if columns == strip.shape[1] else strip[:, first : first + columns]
        first -= strip.shape[1]
    raise IndexError(first)


def i32(value) -> jax.Array:
    return jnp.asarray(value, jnp.int32)


def tiled_buffer(*shape: int, dtype, swizzle: int = 128) -> plgpu.SMEM:
    """Shared memory in the tiles and the swizzle that TMA and the matrix unit read without bank conflicts."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = min(swizzle, shape[-1] * itemsize, NARROW_COLUMNS if itemsize == 1 else 128)
    transforms = (plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def store_untiled(ref, value) -> None:
    """To shared memory without swizzle, which jax from 0.11 on refuses unless told that bank conflicts are acceptable."""
    if BEFORE_0_11:
        ref[...] = value
    else:
        plgpu.store(ref, value, optimized=False)


def load_rows(ref, head, start, num_rows: int, interpreted: bool) -> jax.Array:
    """Rows of HBM ref [heads, rows, lanes] from any `start`, through registers: TMA takes multiples of 8 only."""
    if interpreted:
        return ref[head, pl.ds(start, num_rows)]
    if BEFORE_0_11:
        return plgpu.load(ref, (head, pl.ds(start, num_rows)), layout=plgpu.Layout.WGMMA, optimized=False)
    return plgpu.load(ref.at[head, pl.ds(start, num_rows)], layout=plgpu.Layout.WGMMA, optimized=False)


@dataclass(frozen=True)
class TensorMemory:
    """Where tcgen05 leaves the products of one warpgroup's 64 rows."""

    logits: Any  # f32[64, keys]
    output: Sequence  # f32[64, lanes of a strip], each
    arrived: Any


def tensor_memory(num_keys: int, strips: Sequence[int]) -> list:
    """Scratch for `TensorMemory` of one warpgroup."""
    products = [plgpu.TMEM((WARPGROUP_ROWS, columns), jnp.float32) for columns in (num_keys, *strips)]
    return [*products, plgpu.Barrier(orders_tensor_core=True)]


@dataclass(frozen=True)
class Ops:
    interpreted: bool
    memory: TensorMemory | None = None
    """None where the matrix unit is Hopper's."""

    def with_memory(self, scratch: Sequence) -> Ops:
        """`scratch` as `tensor_memory` made it."""
        logits, *output, arrived = scratch
        return replace(self, memory=TensorMemory(logits, output, arrived))

    def cast(self, x: jax.Array, layout) -> jax.Array:
        return x if self.interpreted else plgpu.layout_cast(x, layout)

    def full(self, shape: tuple[int, ...], value: float) -> jax.Array:
        """float32, spread over the warpgroup as wgmma's accumulator is, or as a row statistic of it."""
        layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
        return self.cast(jnp.full(shape, value, jnp.float32), layout)

    def zero_strips(self, lanes: int, largest: int) -> tuple[jax.Array, ...]:
        return tuple(self.full((WARPGROUP_ROWS, columns), 0.0) for columns in strip_sizes(lanes, largest))

    def iota(self, shape: tuple[int, int], axis: int) -> jax.Array:
        return self.cast(lax.broadcasted_iota(jnp.int32, shape, axis), plgpu.Layout.WGMMA)

    def load_tiled(self, ref) -> jax.Array:
        return self.cast(ref[...], plgpu.Layout.WGMMA)

    def widen(self, source, destination) -> None:
        """A tile of 8 bits into one of 16, both tiled shared memory, through registers: wgmma takes no mixed types."""
        lanes = source.shape[1]
        for first in range(0, lanes, NARROW_COLUMNS):
            columns = pl.ds(first, NARROW_COLUMNS)
            x = self.cast(source.at[:, columns][...], plgpu.Layout.WGMMA_UPCAST_2X).astype(destination.dtype)
            destination.at[:, columns][...] = self.cast(x, plgpu.Layout.WGMMA)
        plgpu.commit_smem()

    def matmul_transposed(self, a, b) -> jax.Array:
        """float32 a @ b.T of shared-memory refs."""
        if self.interpreted:
            return self._read_back(jnp.dot(a[...], b[...].T, preferred_element_type=jnp.float32))
        if self.memory is not None:
            plgpu.tcgen05_mma(
                self.memory.logits, a, plgpu.transpose_ref(b, (1, 0)), self.memory.arrived, accumulate=False
            )
            plgpu.barrier_wait(self.memory.arrived)
            return self._load(self.memory.logits)
        return _wgmma(a, plgpu.transpose_ref(b, (1, 0)), (a.shape[0], b.shape[0]))

    def accumulate(self, strips: tuple[jax.Array, ...], factor: jax.Array, a, b) -> tuple[jax.Array, ...]:
        """strips * factor[:, None] + a @ b, `a` a shared-memory ref or, with wgmma, in registers; strips are of lanes."""
        scaled = [strip * lax.broadcast_in_dim(factor, strip.shape, [0]) for strip in strips]
        if self.interpreted:
            product = self._read_back(jnp.dot(a[...], b[...], preferred_element_type=jnp.float32))
            firsts = range(0, b.shape[1], strips[0].shape[1])
            return tuple(x + product[:, first : first + x.shape[1]] for first, x in zip(firsts, scaled))
        if self.memory is None:
            (scaled,) = scaled
            return (pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(scaled)),)
        first, last = 0, self.memory.output[-1]
        for product in self.memory.output:
            columns = b if len(strips) == 1 else b.at[:, pl.ds(first, product.shape[1])]
            arrived = self.memory.arrived if product is last else None  # once all of them have
            plgpu.tcgen05_mma(product, a, columns, arrived, accumulate=False)
            first += product.shape[1]
        plgpu.barrier_wait(self.memory.arrived)
        return tuple(x + self._load(product) for x, product in zip(scaled, self.memory.output))

    def _load(self, product) -> jax.Array:
        """Waited for, so that `product` may be overwritten, and that no more of them than one fill the registers."""
        loaded = self.cast(plgpu.async_load_tmem(product), plgpu.Layout.WGMMA)
        plgpu.wait_load_tmem()
        return loaded

    def _read_back(self, x: jax.Array) -> jax.Array:
        """A plain read needs a fence before a TMA copy may refill what it read; a read by wgmma needs none."""
        plgpu.commit_smem()
        return x


def _wgmma(a, b, shape: tuple[int, int]) -> jax.Array:
    def run(accumulator):
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def clear_rows_from(ops: Ops, ref, num_rows) -> None:
    """Zeroes rows `num_rows`.. of a tiled [64, lanes] ref: what no token has reached may hold NaN, and 0 * NaN is NaN.

    In columns of 64, so that few registers are needed.
    """
    rows, lanes = ref.shape
    columns = min(lanes, 64)
    for first in range(0, lanes, columns):
        part = ref.at[:, pl.ds(first, columns)]
        keep = ops.iota((rows, columns), 0) < num_rows
        part[...] = jnp.where(keep, ops.load_tiled(part), jnp.zeros((), ref.dtype))
    plgpu.commit_smem()
