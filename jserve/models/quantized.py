"""int8 matrices: weights with one scale an output channel, activations as two int8 digits with one scale a token.

Symmetric, round to nearest, no calibration: value = round(x / scale), scale = max|x| / 127.  A single digit of activations
(W8A8) moves SmolLM2's log-probabilities by 0.37 nats a token, two digits by 0.10, which is what the weights alone do; the
second digit doubles products of which int8 has five times as many a second.  Products accumulate in int32, so that the
result does not depend on the order of a sum.
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jserve.models.packed import PackedMatrix, take_packed_rows
from pallas_kernels.cpu.ops import linear_int8, serves_int8

MIN_ROWS = 8
"""Fewer activation rows are padded to this: XLA's matrix-vector product would widen the weights to int32 instead."""
_DIGIT = 254
"""Steps of the second digit in one of the first: a remainder of at most half a step becomes at most 127."""
_TINY = np.float32(1e-30)
"""Scale of a row that is all zeros."""


@flax.struct.dataclass
class QuantizedMatrix:
    """Stands where a model has a matrix [..., out, in]."""

    values: jax.Array  # i8[..., out, in]
    scales: jax.Array  # f32[..., out]


def quantize_rows(rows: np.ndarray, values: np.ndarray, scales: np.ndarray) -> None:
    """Writes rows [R, in] of a checkpoint as int8 `values` [R, in] and `scales` [R], on the host."""
    rows = rows.astype(np.float32, copy=False)
    scales[:] = np.maximum(np.abs(rows).max(axis=-1) / np.float32(127), _TINY)
    np.rint(rows / scales[..., None], out=values, casting="unsafe")


def quantized_dot(x_TD: jax.Array, weight: QuantizedMatrix) -> jax.Array:
    """f32[T, out]: x in 16 bits by token, times `weight`; by the CPU's own kernel where compiled for a CPU that has it."""
    operands = x_TD.astype(jnp.float32), weight.values, weight.scales
    if not serves_int8(weight.values):
        return two_digit_dot(*operands)
    return jax.lax.platform_dependent(*operands, cpu=linear_int8, default=two_digit_dot)


def gated_dot(x_TD: jax.Array, weight: QuantizedMatrix) -> jax.Array:
    """f32[T, out / 2]: silu of the first half of `quantized_dot` times the second, which the CPU's own kernel does in one."""
    operands = x_TD.astype(jnp.float32), weight.values, weight.scales

    def two_steps(*operands: jax.Array) -> jax.Array:
        gate_TF, up_TF = jnp.split(two_digit_dot(*operands), 2, axis=-1)
        return jax.nn.silu(gate_TF) * up_TF

    if not serves_int8(weight.values):
        return two_steps(*operands)
    return jax.lax.platform_dependent(*operands, cpu=functools.partial(linear_int8, is_gated=True), default=two_steps)


def two_digit_dot(x_TD: jax.Array, weight_OD: jax.Array, scales_O: jax.Array) -> jax.Array:
    """What `linear_int8` computes, of any shape."""
    num_rows = x_TD.shape[0]
    scale_T1 = jnp.maximum(jnp.max(jnp.abs(x_TD), axis=-1, keepdims=True) / 127, _TINY)
    first_TD = jnp.round(x_TD / scale_T1)
    second_TD = jnp.round((x_TD / scale_T1 - first_TD) * _DIGIT)
    digits_RD = jnp.concatenate([first_TD, second_TD]).astype(jnp.int8)  # one product for both: weights are read once
    digits_RD = jnp.pad(digits_RD, ((0, max(0, MIN_ROWS - 2 * num_rows)), (0, 0)))
    sums_RO = jax.lax.dot_general(digits_RD, weight_OD, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
    sums_RO = sums_RO.astype(jnp.float32)
    sums_TO = sums_RO[:num_rows] + sums_RO[num_rows : 2 * num_rows] / _DIGIT
    return sums_TO * scale_T1 * scales_O


def take_rows(
    table: jax.Array | QuantizedMatrix | PackedMatrix, ids: jax.Array, dtype: np.dtype, sum_over: str | None = None
) -> jax.Array:
    """[T, D] rows of an embedding [V, D]; ids were checked at the edge (mode="clip" spares code for negative ones).

    `sum_over`: the mesh axis whose devices have V / devices rows each; exact, as one of them has the row and the others
    add zeros.
    """
    if sum_over is not None:
        num_rows = (table.values if isinstance(table, QuantizedMatrix) else table).shape[0]
        ids = ids - num_rows * jax.lax.axis_index(sum_over)
        is_here = (ids >= 0) & (ids < num_rows)
        return jax.lax.psum(jnp.where(is_here[:, None], take_rows(table, ids, dtype), 0), sum_over)
    if isinstance(table, PackedMatrix):
        return take_packed_rows(table, ids).astype(dtype)
    if not isinstance(table, QuantizedMatrix):
        return jnp.take(table, ids, axis=0, mode="clip")
    values = jnp.take(table.values, ids, axis=0, mode="clip").astype(jnp.float32)
    return (values * jnp.take(table.scales, ids, mode="clip")[:, None]).astype(dtype)
