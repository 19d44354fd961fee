"""Block copies by XLA: a loop that moves one block of all layers at a time, so that nothing larger is ever in flight."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def copy_blocks(pool: jax.Array, sources: jax.Array, destinations: jax.Array, count: jax.Array) -> jax.Array:
    def one(i: jax.Array, pool: jax.Array) -> jax.Array:
        block = lax.dynamic_slice_in_dim(pool, sources[i], 1, axis=1)
        return lax.dynamic_update_slice_in_dim(pool, block, destinations[i], axis=1)

    return lax.fori_loop(0, count, one, pool)


def gather_blocks(pool: jax.Array, blocks: jax.Array, count: jax.Array) -> jax.Array:
    def one(i: jax.Array, staging: jax.Array) -> jax.Array:
        block = lax.dynamic_index_in_dim(pool, blocks[i], axis=1, keepdims=False)
        return lax.dynamic_update_index_in_dim(staging, block, i, axis=0)

    num_layers, _, *block_shape = pool.shape
    return lax.fori_loop(0, count, one, jnp.zeros((blocks.shape[0], num_layers, *block_shape), pool.dtype))


def scatter_blocks(pool: jax.Array, blocks: jax.Array, staging: jax.Array, count: jax.Array) -> jax.Array:
    def one(i: jax.Array, pool: jax.Array) -> jax.Array:
        block = lax.dynamic_index_in_dim(staging, i, axis=0, keepdims=False)
        return lax.dynamic_update_index_in_dim(pool, block, blocks[i], axis=1)

    return lax.fori_loop(0, count, one, pool)
