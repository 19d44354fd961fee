"""The public calls.  `xla` serves every platform; on TPU, where an XLA update of this layout may copy the whole pool,
`mosaic_tpu` moves blocks by DMA.  Called under jit with the pool donated; knows neither tables nor sequences.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import jax


def copy_blocks(
    pool: jax.Array,  # [L, B, K, planes, P, lanes], updated in place under donation
    sources: jax.Array,  # i32[n]
    destinations: jax.Array,  # i32[n], none of which is a source
    count: jax.Array,  # i32[]: entries from here on are ignored
    *,
    platform: str,
) -> jax.Array:
    """The pool with block `destinations[i]` holding what `sources[i]` holds, in all layers."""
    return _module(platform).copy_blocks(pool, sources, destinations, count)


def gather_blocks(
    pool: jax.Array,  # [L, B, K, planes, P, lanes]
    blocks: jax.Array,  # i32[n]
    count: jax.Array,  # i32[]
    *,
    platform: str,
) -> jax.Array:
    """[n, L, K, planes, P, lanes]: the blocks one after another; entries from `count` on are unspecified."""
    return _module(platform).gather_blocks(pool, blocks, count)


def scatter_blocks(
    pool: jax.Array,  # [L, B, K, planes, P, lanes], updated in place under donation
    blocks: jax.Array,  # i32[n]
    staging: jax.Array,  # [n, L, K, planes, P, lanes]
    count: jax.Array,  # i32[]
    *,
    platform: str,
) -> jax.Array:
    """The pool with block `blocks[i]` holding `staging[i]`; the inverse of gather_blocks."""
    return _module(platform).scatter_blocks(pool, blocks, staging, count)


def _module(platform: str) -> ModuleType:
    name = "mosaic_tpu" if platform == "tpu" else "xla"
    return importlib.import_module(f"pallas_kernels.block_copy.{name}")
