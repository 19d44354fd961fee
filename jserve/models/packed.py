"""Matrices that stay as a GGUF file stores them: blocks of 32 weights in 4 or 8 bits with their scale.

The CPU's matmul expands them as it reads them, to the very numbers that loading them as float32 would give, and a step reads a
sixth of the bytes.  Nothing else can multiply them, so they are made only where that kernel is (`weights.load`).
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu.ops import BLOCK_BYTES, matmul_packed

BLOCK = 32
"""Weights a block, along the input axis."""


@flax.struct.dataclass
class PackedMatrix:
    """Stands where a model has a float32 matrix [..., out, in]."""

    blocks: jax.Array  # u8[..., out, in / BLOCK * BLOCK_BYTES[encoding]]
    encoding: str = flax.struct.field(pytree_node=False)
    """GGUF's name: Q4_0, Q4_1 or Q8_0."""


def packed_row_bytes(num_columns: int, encoding: str) -> int:
    return num_columns // BLOCK * BLOCK_BYTES[encoding]


def packed_dot(x_TD: jax.Array, weight: PackedMatrix) -> jax.Array:
    """f32[T, out]: x times `weight`, with the accuracy of float32."""
    return matmul_packed(x_TD, weight.blocks, weight.encoding)


def take_packed_rows(table: PackedMatrix, ids: jax.Array) -> jax.Array:
    """f32[T, in] rows of a matrix [V, in]."""
    rows = jnp.take(table.blocks, ids, axis=0, mode="clip")
    size = BLOCK_BYTES[table.encoding]
    blocks = rows.reshape(rows.shape[0], -1, size)
    scale = _float16(blocks[..., :2])
    match table.encoding:
        case "Q8_0":
            values = jax.lax.bitcast_convert_type(blocks[..., 2:], jnp.int8).astype(jnp.float32) * scale
        case "Q4_0":
            values = (_nibbles(blocks[..., 2:]) - 8) * scale
        case "Q4_1":
            values = _nibbles(blocks[..., 4:]) * scale + _float16(blocks[..., 2:4])
        case other:
            raise AssertionError(other)
    return values.reshape(rows.shape[0], -1)


def can_pack(encoding: str, shape: tuple[int, ...]) -> bool:
    """Whether the kernel takes a matrix [..., out, in] of this encoding."""
    return encoding in BLOCK_BYTES and len(shape) >= 2 and shape[-1] % BLOCK == 0 and shape[-2] % 32 == 0


def _float16(pair: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(pair, jnp.float16).astype(jnp.float32)[..., None]


def _nibbles(values: jax.Array) -> jax.Array:
    return jnp.concatenate([values & np.uint8(15), values >> np.uint8(4)], axis=-1).astype(jnp.float32)
