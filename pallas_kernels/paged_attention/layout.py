"""The physical layout of the KV pool: `[layers, blocks, kv_heads, planes, block_size, lanes]`, known to nobody else.

One block of all heads is contiguous (one DMA), the shardable axis is kv_heads.  A token's key and value are padded to the
device's width, laid end to end and cut into planes: keys are the first half of `planes * lanes`, values the second half.

A scaled pool (8 bits, CPU) keeps the scale of each token's key, and of its value, of each head behind them in their own
row: whoever copies, shares or moves a block has its scales with it, and later tokens change no earlier one.
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
SCALE_BYTES = 2
"""Of a scale: the upper half of a float32."""
_SMALLEST_SCALE = 2.0**-100


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
    scaled: bool = False
    """Each key and value [head_dim] is followed by its own scale, in SCALE_BYTES more lanes."""

    @property
    def spreads(self) -> bool:
        """Keys and values lie in the coordinates of `spread`; numbers with an exponent of their own gain nothing by it."""
        return self.scaled and jnp.issubdtype(self.dtype, jnp.integer)

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


def layout(
    platform: str, num_kv_heads: int, head_dim: int, block_size: int, dtype, scaled: bool = False
) -> PoolLayout:
    """The layout of `platform`'s pool.  cpu: head_dim as it is; gpu: padded to 64; tpu: 128 lanes, K and V of 64 in one plane.

    NotImplementedError: scales where only CPU has them.

    >>> layout("tpu", 8, 64, 64, "bfloat16").shape(1, 1)
    (1, 1, 8, 1, 64, 128)
    """
    if platform not in PLATFORMS:
        raise ValueError(f"platform={platform!r}: one of {', '.join(PLATFORMS)}")
    for name, value in (("num_kv_heads", num_kv_heads), ("head_dim", head_dim), ("block_size", block_size)):
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    if scaled and jnp.dtype(dtype).itemsize != 1:
        raise ValueError(f"dtype={jnp.dtype(dtype).name}: only 8-bit pools are scaled")
    if scaled and platform != "cpu":
        raise NotImplementedError(f"platform={platform!r}: scales by token and head are built for cpu")
    if platform == "cpu":
        planes, lanes = 2, head_dim + SCALE_BYTES * scaled
    elif platform == "gpu":
        planes, lanes = 2, 64 * -(-head_dim // 64) if head_dim <= 64 else 128 * -(-head_dim // 128)
    elif head_dim <= 64:
        planes, lanes = 1, 128
    else:
        planes, lanes = 2 * -(-head_dim // 128), 128
    return PoolLayout(platform, num_kv_heads, head_dim, block_size, jnp.dtype(dtype), planes, lanes, scaled)


def spread(x: jax.Array) -> jax.Array:
    """[..., H] in other coordinates, and back when done twice: those of Hadamard matrices, as large as H allows.

    Scaled pools of integers hold keys and values so.  A few components of a key are many times as large as the others; with a scale for
    all of them the others would be rounded to nothing.  Products of queries and keys stay what they are.
    """
    pieces, start = [], 0
    for bit in reversed(range(x.shape[-1].bit_length())):
        size = x.shape[-1] & (1 << bit)
        if size:
            part = x[..., start : start + size].astype(jnp.float32)
            pieces.append(jnp.dot(part, _hadamard(size), precision="highest"))
            start += size
    return jnp.concatenate(pieces, axis=-1).astype(x.dtype)


def _hadamard(size: int) -> np.ndarray:
    """f32[size, size] for a power of two: symmetric, and its own inverse."""
    index = np.arange(size)
    signs = [[bin(row & column).count("1") % 2 for column in index] for row in index]
    return ((1 - 2 * np.array(signs)) / math.sqrt(size)).astype(np.float32)


def pack(k: jax.Array, v: jax.Array, layout: PoolLayout, k_scale=None, v_scale=None) -> jax.Array:
    """k, v [T, K, H] -> what the pool stores for each token, storage_dtype[T, K, planes, lanes]."""
    width = layout.planes * layout.lanes // 2
    k, v = stored(k, layout, k_scale), stored(v, layout, v_scale)
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, width - x.shape[-1]))) for x in (k, v))
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
    values = lambda x, scale: _from_storage(x[..., : layout.head_dim], x[..., layout.head_dim :], layout, scale)
    return tuple(values(x, scale) for x, scale in zip(halves, (k_scale, v_scale)))


def read_blocks(
    pool: jax.Array, layer: jax.Array | int, block_ids: jax.Array, layout: PoolLayout
) -> tuple[jax.Array, jax.Array]:
    """Keys and values of the blocks i32[...] in one layer, each float32[..., K, P, H], times the scales in the pool.

    Ids outside the pool read the dead block.  K and V are gathered apart where they are planes of their own: each gather
    then fuses with what is done to its result, one gather for both would be written out and read twice.
    """
    block_ids = jnp.where((block_ids >= 0) & (block_ids < pool.shape[1]), block_ids, DEAD_BLOCK)
    if layout.planes != 2:
        return unpack(pool[layer, block_ids], layout)
    lanes = lambda plane, begin, end: pool[layer, block_ids, :, plane, :, begin:end]
    size = layout.head_dim
    return tuple(
        _from_storage(lanes(plane, 0, size), lanes(plane, size, None) if layout.scaled else None, layout, None)
        for plane in (0, 1)
    )


def write_tokens(
    pool: jax.Array, layer: jax.Array | int, blocks: jax.Array, offsets: jax.Array, tokens: jax.Array
) -> jax.Array:
    """Scatters packed tokens [T, K, planes, lanes] to slot `offsets` of `blocks` (i32[T] each); in place when donated.

    Ids outside the pool are dropped by the scatter; negative ones, which JAX would count from the end, go to the dead block.
    """
    return pool.at[layer, jnp.maximum(blocks, DEAD_BLOCK), :, :, offsets].set(tokens, mode="drop")


def stored(x: jax.Array, layout: PoolLayout, scale=None) -> jax.Array:
    """[T, K, H] of any float type -> storage bits, divided by `scale` (f32 scalar or f32[K]) where there is one.

    Of a scaled layout [T, K, H + SCALE_BYTES]: the largest of each H becomes the largest number there is.
    """
    if scale is not None:
        x = x.astype(jnp.float32) / jnp.reshape(jnp.asarray(scale, jnp.float32), (-1, 1))
    scales = None
    if layout.scaled:
        x = x.astype(jnp.float32)
        scales = _upper_halves(jnp.max(jnp.abs(x), axis=-1, keepdims=True) / _largest(layout.dtype))
        x = x / _from_upper_halves(scales)
    if jnp.issubdtype(layout.dtype, jnp.integer):
        limit = _largest(layout.dtype)
        x = jnp.clip(jnp.round(x), -limit, limit)
    elif layout.dtype.itemsize == 1 or layout.dtype == jnp.float16:
        limit = _largest(layout.dtype)
        x = jnp.clip(x.astype(jnp.float32), -limit, limit)  # an overflow would become infinite, of fp8 NaN
    x = x.astype(layout.dtype)
    bits = x if layout.storage_dtype == layout.dtype else jax.lax.bitcast_convert_type(x, layout.storage_dtype)
    if scales is None:
        return bits
    scale_bytes = jax.lax.bitcast_convert_type(scales[..., 0], jnp.uint8)
    return jnp.concatenate([bits, jax.lax.bitcast_convert_type(scale_bytes, layout.storage_dtype)], axis=-1)


def _from_storage(x: jax.Array, scale_bytes: jax.Array | None, layout: PoolLayout, scale) -> jax.Array:
    """Storage bits [..., K, P, H] -> float32, times their own scales [..., K, P, SCALE_BYTES] in a scaled layout, and
    times `scale` where there is one."""
    factor = 1.0
    if layout.storage_dtype != layout.dtype:
        if layout.dtype == jnp.bfloat16:  # the upper half of a float32: a shift is cheaper than a conversion on CPU
            x = _from_upper_halves(x)
        elif layout.dtype == jnp.float8_e4m3fn:  # as float16, which CPUs convert: the same bits, 2**8 too small
            bits = x.astype(jnp.uint16)
            x, factor = jax.lax.bitcast_convert_type((bits & 0x80) << 8 | (bits & 0x7F) << 7, jnp.float16), 256.0
        else:
            x = jax.lax.bitcast_convert_type(x, layout.dtype)
    x = x.astype(jnp.float32)
    if layout.scaled:
        halves = jax.lax.bitcast_convert_type(scale_bytes, jnp.uint16)
        x = x * (_from_upper_halves(halves) * factor)[..., None]
    elif factor != 1.0:
        x = x * factor
    return x if scale is None else x * jnp.reshape(jnp.asarray(scale, jnp.float32), (-1, 1, 1))


def _largest(dtype: np.dtype) -> float:
    return float(jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).max)


def _upper_halves(x: jax.Array) -> jax.Array:
    """u16: the upper half of each float32, rounded up, and of one of at least _SMALLEST_SCALE."""
    bits = jax.lax.bitcast_convert_type(jnp.maximum(x, _SMALLEST_SCALE), jnp.uint32)
    return ((bits + 0xFFFF) >> 16).astype(jnp.uint16)


def _from_upper_halves(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x.astype(jnp.uint32) << 16, jnp.float32)
