"""The pieces that model families share: norm, linear, rotary embedding.

Shape letters: T tokens, D model, N query heads, K kv heads, G query heads of one kv head, H head dim, R rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jserve.models.config import RopeScaling
from jserve.models.packed import PackedMatrix, packed_dot
from jserve.models.quantized import QuantizedMatrix, quantized_dot
from pallas_kernels.cpu.ops import matmul, serves_matmul


def rms_norm(x_TD: jax.Array, weight_D: jax.Array, eps: float, adds_one: bool = False) -> jax.Array:
    """x / rms(x) * weight over the last axis; statistics in float32 (a sum of D squares loses too much in 16 bits).

    `adds_one` is Gemma's: times 1 + weight, and in float32 up to the end.
    """
    x = x_TD.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    if adds_one:
        return (x * (1 + weight_D.astype(jnp.float32))).astype(x_TD.dtype)
    return x.astype(x_TD.dtype) * weight_D


def linear(
    x_TD: jax.Array,
    weight: jax.Array | QuantizedMatrix | PackedMatrix,
    bias: jax.Array | None = None,
    sum_over: str | None = None,
) -> jax.Array:
    """x @ weight.T (+ bias) for a weight [out, D], accumulated in float32, in x's dtype.

    `sum_over`: the mesh axis whose devices have a part of D each.  Their results travel in x's dtype: half the bytes of
    float32, and one rounding for each.

    In float32 the weight is the left operand: XLA's CPU matmul is then a quarter faster at 8 to 32 rows, and no slower at
    others.  In 16 bits both operands keep their order of axes: XLA's CPU compiler would first widen a transposed one, and
    the weights with it, to float32, which takes five to ten times as long.
    """
    if isinstance(weight, QuantizedMatrix):
        y = quantized_dot(x_TD, weight)
    elif isinstance(weight, PackedMatrix):
        y = packed_dot(x_TD, weight)
    elif x_TD.dtype.itemsize == 2:
        y = jax.lax.dot_general(x_TD, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    else:
        y = cpu_kernel_or(_weight_first, x_TD, weight)
    if sum_over is not None:
        y = jax.lax.psum(y.astype(x_TD.dtype), sum_over).astype(jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x_TD.dtype)


def cpu_kernel_or(
    dot: Callable[[jax.Array, jax.Array], jax.Array], x_TD: jax.Array, weight_OD: jax.Array
) -> jax.Array:
    """x @ weight.T by the CPU's own kernel where this is compiled for a CPU that has it, else by `dot`."""
    if not serves_matmul(x_TD, weight_OD):
        return dot(x_TD, weight_OD)
    return jax.lax.platform_dependent(x_TD, weight_OD, cpu=matmul, default=dot)


def _weight_first(x_TD: jax.Array, weight_OD: jax.Array) -> jax.Array:
    return jnp.dot(weight_OD, x_TD.T, precision=dot_precision(x_TD.dtype), preferred_element_type=jnp.float32).T


def dot_precision(dtype: np.dtype) -> jax.lax.Precision | None:
    """A float32 model gets float32 products; the default would round its operands to fewer bits on TPU and GPU."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def rope_table(rope: RopeScaling, head_dim: int, positions_T: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), each f32[T, head_dim / 2].  float32 because at position 8192 a 16-bit angle is off by whole turns."""
    angles = positions_T.astype(jnp.float32)[:, None] * inverse_frequencies(rope, head_dim)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x_TKGH: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates (x[i], x[i + H/2]) by the angle of frequency i: HF's order of the head dim."""
    cos, sin = (part[:, None, None, :] for part in table)
    first, second = jnp.split(x_TKGH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_TKGH.dtype)


def inverse_frequencies(rope: RopeScaling, head_dim: int) -> np.ndarray:
    """f32[head_dim / 2], computed on the host in HF's order of operations (transformers' modeling_rope_utils)."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.float32(1) / np.power(np.float32(rope.theta), exponents)
    match rope.kind:
        case "default":
            return frequencies
        case "linear":
            return frequencies / np.float32(rope.factor)
        case "divisors":
            return frequencies / np.asarray(rope.divisors, np.float32)
        case "llama3":
            return _llama3(frequencies, rope)
    raise AssertionError(rope)


def _llama3(frequencies: np.ndarray, rope: RopeScaling) -> np.ndarray:
    """Llama 3.1: short waves stay, waves longer than the original context are stretched, those between are blended."""
    context, low, high = rope.original_context_length, rope.low_freq_factor, rope.high_freq_factor
    factor = np.float32(rope.factor)
    wavelengths = np.float32(2 * math.pi) / frequencies
    smooth = (np.float32(context) / wavelengths - np.float32(low)) / np.float32(high - low)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    stretched = np.where(wavelengths > context / low, frequencies / factor, blended)
    return np.where(wavelengths < context / high, frequencies, stretched).astype(np.float32)
