"""Matrices that stay packed as a GGUF file stores them: blocks of 32 weights in 4 or 8 bits with their scale.

The CPU's matmul reads them with the accuracy of float32, and a step reads a sixth of the bytes.  Nothing else can multiply them,
so they are made only where that kernel is (`weights.load`).
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu.ops import matmul_packed
from pallas_kernels.cpu.packed_layout import BLOCK_BYTES, COLUMNS, DEPTH, NUM_FACTORS


@flax.struct.dataclass
class PackedMatrix:
    """Stands where a model has a float32 matrix [..., out, in]."""

    tiles: jax.Array  # u8[..., out / 16, bytes], see packed_layout
    encoding: str = flax.struct.field(pytree_node=False)
    """GGUF's name: Q4_0, Q4_1 or Q8_0."""


def packed_row_bytes(num_columns: int, encoding: str) -> int:
    return num_columns // DEPTH * BLOCK_BYTES[encoding]


def packed_shape(shape: tuple[int, ...], encoding: str) -> tuple[int, ...]:
    """Of the tiles of a matrix [..., out, in]."""
    *lead, num_rows, num_columns = shape
    return *lead, num_rows // COLUMNS, COLUMNS * packed_row_bytes(num_columns, encoding)


def packed_dot(x_TD: jax.Array, weight: PackedMatrix) -> jax.Array:
    """f32[T, out]: x times `weight`, with the accuracy of float32."""
    return matmul_packed(x_TD, weight.tiles, weight.encoding)


def take_packed_rows(table: PackedMatrix, ids: jax.Array) -> jax.Array:
    """f32[T, in] rows of a matrix [V, in]."""
    size, factor_bytes = BLOCK_BYTES[table.encoding], 2 * NUM_FACTORS[table.encoding]
    tiles = table.tiles.reshape(table.tiles.shape[0], -1, size, COLUMNS)  # [V / 16, steps, bytes, 16]
    rows, lanes = jnp.minimum(ids, tiles.shape[0] * COLUMNS - 1) // COLUMNS, ids % COLUMNS
    values = tiles[:, :, factor_bytes:][rows, :, :, lanes]
    # A block's factors are 16 pairs of bytes, each two neighbours in what `tiles` holds as 2 x 16.
    pairs = tiles[:, :, :factor_bytes].reshape(*tiles.shape[:2], -1, COLUMNS, 2)
    factors = jax.lax.bitcast_convert_type(pairs[rows, :, :, lanes], jnp.float16).astype(jnp.float32)
    scale = factors[..., :1]
    match table.encoding:
        case "Q8_0":
            weights = jax.lax.bitcast_convert_type(values, jnp.int8).astype(jnp.float32) * scale
        case "Q4_0":
            weights = (_nibbles(values) - 8) * scale
        case "Q4_1":
            weights = _nibbles(values) * scale + factors[..., 1:]
        case other:
            raise AssertionError(other)
    return weights.reshape(ids.shape[0], -1)


def can_pack(encoding: str, shape: tuple[int, ...]) -> bool:
    """Whether the kernel takes a matrix [..., out, in] of this encoding."""
    return encoding in BLOCK_BYTES and len(shape) >= 2 and shape[-1] % DEPTH == 0 and shape[-2] % 32 == 0


def _nibbles(values: jax.Array) -> jax.Array:
    return jnp.concatenate([values & np.uint8(15), values >> np.uint8(4)], axis=-1).astype(jnp.float32)
