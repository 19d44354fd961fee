"""The physical layout of the KV pool: `[layers, blocks, kv_heads, planes, block_size, lanes]`, known to nobody else.

One block of all heads is contiguous (one DMA), the shardable axis is kv_heads.  A token's key and value are padded to the
device's width, laid end to end and cut into planes: keys are the first half of `planes * lanes`, values the second half.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

PLATFORMS = ("cpu", "gpu", "tpu")
DEAD_BLOCK = 0
"""Physical block that no sequence owns: padding writes go there, unused table entries point there; it may hold anything."""


@dataclass(frozen=True)
class PoolLayout:
    """What one pool looks like.  Made by `layout()`; `dtype` is the values' type, `storage_dtype` the array's."""

    platform: str
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: np.dtype
    planes: int
    lanes: int

    @property
    def storage_dtype(self) -> np.dtype:
        """CPU pools keep narrow floats as raw bits: XLA's CPU scatter into a bfloat16 array converts the whole array."""
        if self.platform == "cpu" and jnp.issubdtype(self.dtype, jnp.floating) and self.dtype.itemsize < 4:
            return np.dtype(f"uint{8 * self.dtype.itemsize}")
        return self.dtype

    def shape(self, num_layers: int, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        return (num_layers, num_blocks, self.num_kv_heads, self.planes, self.block_size, self.lanes)

    def bytes_per_block(self, num_layers: int) -> int:
        return math.prod(self.shape(num_layers, 1)) * self.storage_dtype.itemsize

    def allocate(self, num_layers: int, num_blocks: int) -> jax.Array:
        """A pool of zeros."""
        return jnp.zeros(self.shape(num_layers, num_blocks), self.storage_dtype)


def layout(platform: str, num_kv_heads: int, head_dim: int, block_size: int, dtype) -> PoolLayout:
    """The layout of `platform`'s pool.  cpu: head_dim as it is; gpu: padded to 64; tpu: 128 lanes, K and V of 64 in one plane.

    >>> layout("tpu", 8, 64, 64, "bfloat16").shape(1, 1)
    (1, 1, 8, 1, 64, 128)
    """
    if platform not in PLATFORMS:
        raise ValueError(f"platform={platform!r}: one of {', '.join(PLATFORMS)}")
    for name, value in (("num_kv_heads", num_kv_heads), ("head_dim", head_dim), ("block_size", block_size)):
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    if platform == "cpu":
        planes, lanes = 2, head_dim
    elif platform == "gpu":
        planes, lanes = 2, 64 * -(-head_dim // 64) if head_dim <= 64 else 128 * -(-head_dim // 128)
    elif head_dim <= 64:
        planes, lanes = 1, 128
    else:
        planes, lanes = 2 * -(-head_dim // 128), 128
    return PoolLayout(platform, num_kv_heads, head_dim, block_size, jnp.dtype(dtype), planes, lanes)


def pack(k: jax.Array, v: jax.Array, layout: PoolLayout, k_scale=None, v_scale=None) -> jax.Array:
    """k, v [T, K, H] -> what the pool stores for each token, storage_dtype[T, K, planes, lanes]."""
    width = layout.planes * layout.lanes // 2
    padding = ((0, 0), (0, 0), (0, width - layout.head_dim))
    k, v = (jnp.pad(_to_storage(x, layout, scale), padding) for x, scale in ((k, k_scale), (v, v_scale)))
    return jnp.concatenate([k, v], axis=-1).reshape(k.shape[0], layout.num_kv_heads, layout.planes, layout.lanes)


def unpack(blocks: jax.Array, layout: PoolLayout, k_scale=None, v_scale=None) -> tuple[jax.Array, jax.Array]:
    """Stored blocks [..., K, planes, P, lanes] -> keys and values, each float32[..., K, P, H]."""
    half = layout.planes // 2
    if half == 0:
        halves = blocks[..., 0, :, : layout.lanes // 2], blocks[..., 0, :, layout.lanes // 2 :]
    elif half == 1:
        halves = blocks[..., 0, :, :], blocks[..., 1, :, :]
    else:
        halves = tuple(
            jnp.moveaxis(x, -3, -2).reshape(*x.shape[:-3], layout.block_size, half * layout.lanes)
            for x in (blocks[..., :half, :, :], blocks[..., half:, :, :])
        )
    return tuple(
        _from_storage(x[..., : layout.head_dim], layout, scale) for x, scale in zip(halves, (k_scale, v_scale))
    )


def read_blocks(
    pool: jax.Array, layer: jax.Array | int, block_ids: jax.Array, layout: PoolLayout
) -> tuple[jax.Array, jax.Array]:
    """Keys and values of the blocks i32[...] in one layer, each float32[..., K, P, H], unscaled.

    Ids outside the pool read the dead block.  K and V are gathered apart where they are planes of their own: each gather
    then fuses with what is done to its result, one gather for both would be written out and read twice.
    """
    block_ids = jnp.where((block_ids >= 0) & (block_ids < pool.shape[1]), block_ids, DEAD_BLOCK)
    if layout.planes != 2:
        return unpack(pool[layer, block_ids], layout)
    return tuple(_from_storage(pool[layer, block_ids, :, plane, :, : layout.head_dim], layout, None) for plane in (0, 1))


def write_tokens(
    pool: jax.Array, layer: jax.Array | int, blocks: jax.Array, offsets: jax.Array, tokens: jax.Array
) -> jax.Array:
    """Scatters packed tokens [T, K, planes, lanes] to slot `offsets` of `blocks` (i32[T] each); in place when donated.

    Ids outside the pool are dropped by the scatter; negative ones, which JAX would count from the end, go to the dead block.
    """
    return pool.at[layer, jnp.maximum(blocks, DEAD_BLOCK), :, :, offsets].set(tokens, mode="drop")


def _to_storage(x: jax.Array, layout: PoolLayout, scale) -> jax.Array:
    """[T, K, H] of any float type -> storage bits, divided by `scale` (f32 scalar or f32[K]) where there is one."""
    if scale is not None:
        x = x.astype(jnp.float32) / jnp.reshape(jnp.asarray(scale, jnp.float32), (-1, 1))
    if jnp.issubdtype(layout.dtype, jnp.integer):
        limit = jnp.iinfo(layout.dtype)
        x = jnp.clip(jnp.round(x), -limit.max, limit.max)
    elif layout.dtype.itemsize == 1:
        limit = float(jnp.finfo(layout.dtype).max)
        x = jnp.clip(x.astype(jnp.float32), -limit, limit)  # an fp8 overflow would become NaN
    x = x.astype(layout.dtype)
    return x if layout.storage_dtype == layout.dtype else jax.lax.bitcast_convert_type(x, layout.storage_dtype)


def _from_storage(x: jax.Array, layout: PoolLayout, scale) -> jax.Array:
    """Storage bits [..., K, P, H] -> float32, times `scale` where there is one."""
    if layout.storage_dtype != layout.dtype:
        if layout.dtype == jnp.bfloat16:  # the upper half of a float32: a shift is cheaper than a conversion on CPU
            x = jax.lax.bitcast_convert_type(x.astype(jnp.uint32) << 16, jnp.float32)
        else:
            x = jax.lax.bitcast_convert_type(x, layout.dtype)
    x = x.astype(jnp.float32)
    return x if scale is None else x * jnp.reshape(jnp.asarray(scale, jnp.float32), (-1, 1, 1))
