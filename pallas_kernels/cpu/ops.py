"""The CPU kernels as functions of jax arrays.  llvmlite is imported where a kernel is first asked for, and only there."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

import jax
import jax.numpy as jnp

from pallas_kernels.cpu.compiled import compile_handler, num_slots, why_no_simd, why_no_tiles

BLOCK_BYTES = MappingProxyType({"Q4_0": 18, "Q4_1": 20, "Q8_0": 34})
"""GGUF's encodings that `matmul_packed` reads: bytes of 32 weights."""


def serves_matmul(x_TD: jax.Array, weight_OD: jax.Array) -> bool:
    """Whether `matmul` can take these."""
    return (
        x_TD.dtype == weight_OD.dtype == jnp.float32
        and weight_OD.shape[0] % 32 == 0
        and weight_OD.shape[1] % 32 == 0
        and why_no_tiles() is None
    )


def matmul(x_TD: jax.Array, weight_OD: jax.Array) -> jax.Array:
    """f32[T, O] = x @ weight.T with the accuracy of float32; on CPU only, where `serves_matmul`."""
    return _matmul(x_TD, weight_OD, "F32")


def matmul_packed(x_TD: jax.Array, blocks_OB: jax.Array, encoding: str) -> jax.Array:
    """As `matmul` of the weights that u8[O, D / 32 * BLOCK_BYTES[encoding]] stands for, bit for bit."""
    if x_TD.shape[1] // 32 * BLOCK_BYTES[encoding] != blocks_OB.shape[1]:
        raise ValueError(f"x {x_TD.shape} does not fit rows of {blocks_OB.shape[1]} bytes of {encoding}")
    return _matmul(x_TD, blocks_OB, encoding)


def _matmul(x_TD: jax.Array, weight: jax.Array, encoding: str) -> jax.Array:
    from pallas_kernels.cpu.matmul import scratch_bytes

    num_rows, depth = x_TD.shape
    results = jax.ShapeDtypeStruct((num_rows, weight.shape[0]), jnp.float32), *(
        jax.ShapeDtypeStruct((size,), jnp.uint8) for size in scratch_bytes(num_rows, depth, num_slots())
    )
    return jax.ffi.ffi_call(register_matmul(encoding), results)(x_TD, weight)[0]


def serves_int8(weight_OD: jax.Array) -> bool:
    """Whether `linear_int8` can take this."""
    return weight_OD.shape[0] % 32 == 0 and weight_OD.shape[1] % 64 == 0 and why_no_tiles() is None


def linear_int8(x_TD: jax.Array, weight_OD: jax.Array, scales_O: jax.Array) -> jax.Array:
    """f32[T, O] = x @ (weight * scales).T of x f32[T, D] in two int8 digits; on CPU only, where `serves_int8`."""
    from pallas_kernels.cpu.linear_int8 import scratch_bytes

    num_rows, depth = x_TD.shape
    y = jax.ShapeDtypeStruct((num_rows, weight_OD.shape[0]), jnp.float32)
    scratch = jax.ShapeDtypeStruct((scratch_bytes(num_rows, depth),), jnp.uint8)
    return jax.ffi.ffi_call(_register_int8(), (y, scratch))(x_TD, weight_OD, scales_O)[0]


def _register_int8() -> str:
    if lack := why_no_tiles():
        raise NotImplementedError(lack)
    from pallas_kernels.cpu.linear_int8 import add_linear_int8

    return compile_handler("jserve_linear_int8", add_linear_int8)


def register_kernels(encodings: Iterable[str]) -> None:
    """Makes the matmuls of F32, INT8 or packed weights known to XLA where this machine can run them: programs that were
    compiled earlier call them by name."""
    if why_no_tiles() is None:
        for encoding in encodings:
            _register_int8() if encoding == "INT8" else register_matmul(encoding)


def register_matmul(encoding: str) -> str:
    """Compiles the kernel if need be; its name in XLA.  NotImplementedError says what this machine lacks."""
    if lack := why_no_tiles():  # asking is also what makes Linux grant the tiles
        raise NotImplementedError(lack)
    from pallas_kernels.cpu.matmul import add_matmul

    return compile_handler(f"jserve_matmul_{encoding.lower()}", add_matmul, encoding)


def attention(
    q_TNH: jax.Array, pool: jax.Array, layer: jax.Array, row_T, first_T, length_T, tables: jax.Array
) -> jax.Array:
    """f32[T, N, H]; see `add_attention` for the arguments."""
    from pallas_kernels.cpu.attention import scratch_floats

    num_keys = tables.shape[1] * pool.shape[4]
    scores = scratch_floats(q_TNH.shape[1] // pool.shape[2], num_keys, num_slots())
    results = jax.ShapeDtypeStruct(q_TNH.shape, jnp.float32), jax.ShapeDtypeStruct((scores,), jnp.float32)
    call = jax.ffi.ffi_call(register_attention(q_TNH.shape[2]), results)
    return call(q_TNH, pool, jnp.reshape(layer, (1,)).astype(jnp.int32), row_T, first_T, length_T, tables)[0]


def register_attention(head_dim: int) -> str:
    """As `register_matmul`."""
    from pallas_kernels.cpu.attention import add_attention

    return compile_handler(f"jserve_attention_f32_{head_dim}", add_attention, head_dim)
