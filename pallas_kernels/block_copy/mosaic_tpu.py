"""TPU: copies of whole blocks within a pool, and to and from a staging buffer, as DMAs from HBM to HBM.

Used for copy-on-write and for swapping.  The pool is aliased, never copied.  Compiled for v4 to tpu7x and
interpreted; not run on hardware.

One program and no grid: a loop starts the DMA of block i, all layers of it, after that of block i - IN_FLIGHT is done.
Sources and destinations of one call must not overlap: the DMAs run in any order.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

IN_FLIGHT = 8


def copy_blocks(
    pool: jax.Array,  # [L, B, K, planes, P, lanes], donated
    sources: jax.Array,  # i32[n]
    destinations: jax.Array,  # i32[n], none of which is a source
    count: jax.Array,  # i32[]: entries from here on are ignored
    *,
    interpret=False,
) -> jax.Array:
    """The pool with block `destinations[i]` holding what `sources[i]` holds."""

    def kernel(sources_ref, destinations_ref, count_ref, _, pool_ref, semaphores):
        _pipelined(
            count_ref[0],
            lambda i: (pool_ref.at[:, sources_ref[i]], pool_ref.at[:, destinations_ref[i]]),
            semaphores,
        )

    return _call(kernel, "jserve_copy_blocks", (sources, destinations), count, (pool,), pool, 0, interpret)


def gather_blocks(
    pool: jax.Array,  # [L, B, K, planes, P, lanes]
    blocks: jax.Array,  # i32[n]
    count: jax.Array,  # i32[]
    *,
    interpret=False,
) -> jax.Array:
    """[n, L, K, planes, P, lanes]: the blocks one after another; entries from `count` on are unspecified."""
    num_layers, _, *block_shape = pool.shape
    staging = jax.ShapeDtypeStruct((blocks.shape[0], num_layers, *block_shape), pool.dtype)

    def kernel(blocks_ref, count_ref, pool_ref, staging_ref, semaphores):
        _pipelined(count_ref[0], lambda i: (pool_ref.at[:, blocks_ref[i]], staging_ref.at[i]), semaphores)

    return _call(kernel, "jserve_gather_blocks", (blocks,), count, (pool,), staging, None, interpret)


def scatter_blocks(
    pool: jax.Array,  # [L, B, K, planes, P, lanes], donated
    blocks: jax.Array,  # i32[n], all different
    staging: jax.Array,  # [n, L, K, planes, P, lanes], as gather_blocks made it
    count: jax.Array,  # i32[]
    *,
    interpret=False,
) -> jax.Array:
    """The pool with block `blocks[i]` holding `staging[i]`."""

    def kernel(blocks_ref, count_ref, _, staging_ref, pool_ref, semaphores):
        _pipelined(count_ref[0], lambda i: (staging_ref.at[i], pool_ref.at[:, blocks_ref[i]]), semaphores)

    return _call(kernel, "jserve_scatter_blocks", (blocks,), count, (pool, staging), pool, 0, interpret)


def _pipelined(count, ends_of: Callable, semaphores) -> None:
    """DMAs 0..count-1 with IN_FLIGHT of them under way; `ends_of(i)` is (source, destination)."""

    def copy(i):
        return pltpu.make_async_copy(*ends_of(i), semaphores.at[i % IN_FLIGHT])

    def one(i, _):
        @pl.when(i >= IN_FLIGHT)
        def _():
            copy(i - IN_FLIGHT).wait()

        copy(i).start()
        return 0

    lax.fori_loop(0, count, one, 0)
    lax.fori_loop(jnp.maximum(count - IN_FLIGHT, 0), count, lambda i, _: (copy(i).wait(), 0)[1], 0)


def _call(kernel, name: str, ids, count, arrays, out, aliased: int | None, interpret) -> jax.Array:
    num_scalars = len(ids) + 1
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=num_scalars,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(arrays),
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[pltpu.SemaphoreType.DMA((IN_FLIGHT,))],
        ),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        input_output_aliases={} if aliased is None else {num_scalars + aliased: 0},
        compiler_params=pltpu.CompilerParams(has_side_effects=True),
        interpret=interpret,
        name=name,
    )(*(x.astype(jnp.int32) for x in ids), jnp.asarray(count, jnp.int32).reshape(1), *arrays)
