"""What the GPU kernels share: compiler parameters, shared-memory buffers, steps that jax versions spell differently.

`interpreted` kernels (GPU interpreter on CPU) replace wgmma and layout casts, for which jax 0.10's interpreter has no
rule, by plain reads of the same buffers: a read before its data has arrived then shows, and the race detector sees it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# Warpgroup semantics refuse what lane semantics would silently compile to wrong data: a TMA copy into tiled shared memory
# whose start row is not known to be a multiple of 8.
COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
WARPGROUP_ROWS = 64
"""Rows of one wgmma."""
MASKED = -1e30
"""A masked logit: finite, so that a row with nothing visible yet gives exp2(0) and later a factor 0, never inf - inf."""
LOG2_E = math.log2(math.e)
_BEFORE_0_11 = tuple(int(x) for x in jax.__version__.split(".")[:2]) < (0, 11)


def i32(value) -> jax.Array:
    return jnp.asarray(value, jnp.int32)


def tiled_buffer(*shape: int, dtype) -> plgpu.SMEM:
    """Shared memory in the tiles and the swizzle that TMA and wgmma read without bank conflicts."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = min(128, shape[-1] * itemsize)
    transforms = (plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def store_untiled(ref, value) -> None:
    """To shared memory without swizzle, which jax from 0.11 on refuses unless told that bank conflicts are acceptable."""
    if _BEFORE_0_11:
        ref[...] = value
    else:
        plgpu.store(ref, value, optimized=False)


def load_rows(ref, head, start, num_rows: int, interpreted: bool) -> jax.Array:
    """Rows of HBM ref [heads, rows, lanes] from any `start`, through registers: TMA takes multiples of 8 only."""
    if interpreted:
        return ref[head, pl.ds(start, num_rows)]
    if _BEFORE_0_11:
        return plgpu.load(ref, (head, pl.ds(start, num_rows)), layout=plgpu.Layout.WGMMA, optimized=False)
    return plgpu.load(ref.at[head, pl.ds(start, num_rows)], layout=plgpu.Layout.WGMMA, optimized=False)


@dataclass(frozen=True)
class Ops:
    interpreted: bool

    def cast(self, x: jax.Array, layout) -> jax.Array:
        return x if self.interpreted else plgpu.layout_cast(x, layout)

    def full(self, shape: tuple[int, ...], value: float) -> jax.Array:
        """float32, spread over the warpgroup as wgmma's accumulator is, or as a row statistic of it."""
        layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
        return self.cast(jnp.full(shape, value, jnp.float32), layout)

    def iota(self, shape: tuple[int, int], axis: int) -> jax.Array:
        return self.cast(lax.broadcasted_iota(jnp.int32, shape, axis), plgpu.Layout.WGMMA)

    def load_tiled(self, ref) -> jax.Array:
        return self.cast(ref[...], plgpu.Layout.WGMMA)

    def matmul_transposed(self, a, b) -> jax.Array:
        """float32 a @ b.T of shared-memory refs."""
        if self.interpreted:
            return self._read_back(jnp.dot(a[...], b[...].T, preferred_element_type=jnp.float32))
        return _wgmma(a, plgpu.transpose_ref(b, (1, 0)), (a.shape[0], b.shape[0]))

    def matmul(self, a, b) -> jax.Array:
        """float32 a @ b of shared-memory refs."""
        if self.interpreted:
            return self._read_back(jnp.dot(a[...], b[...], preferred_element_type=jnp.float32))
        return _wgmma(a, b, (a.shape[0], b.shape[1]))

    def accumulate(self, accumulator: jax.Array, a: jax.Array, b) -> jax.Array:
        """accumulator + a @ b with `a` in registers and the accumulator in place."""
        if self.interpreted:
            return accumulator + self._read_back(jnp.dot(a, b[...], preferred_element_type=jnp.float32))
        return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(accumulator))

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
