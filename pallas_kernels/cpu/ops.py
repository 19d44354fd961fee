"""The CPU kernels as functions of jax arrays.  llvmlite is imported where a kernel is first asked for, and only there."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from pallas_kernels.cpu.compiled import compile_handler, num_slots, why_no_simd, why_no_tiles
from pallas_kernels.cpu.packed_layout import BLOCK_BYTES, COLUMNS, DEPTH


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
    from pallas_kernels.cpu.matmul import scratch_bytes

    scratch = scratch_bytes(*x_TD.shape, num_slots())
    return _matmul(register_matmul("F32"), x_TD, weight_OD, weight_OD.shape[0], scratch)


def matmul_packed(x_TD: jax.Array, tiles_NB: jax.Array, encoding: str) -> jax.Array:
    """f32[T, O] = x @ weight.T with the accuracy of float32, of the weights that `tiled` made u8[O / 16, bytes] of."""
    from pallas_kernels.cpu.matmul_packed import scratch_bytes

    if x_TD.shape[1] // DEPTH * BLOCK_BYTES[encoding] * COLUMNS != tiles_NB.shape[1]:
        raise ValueError(f"x {x_TD.shape} does not fit tiles of {tiles_NB.shape[1]} bytes of {encoding}")
    scratch = scratch_bytes(*x_TD.shape, num_slots())
    return _matmul(register_matmul(encoding), x_TD, tiles_NB, tiles_NB.shape[0] * COLUMNS, scratch)


def _matmul(name: str, x_TD: jax.Array, weight: jax.Array, num_outputs: int, scratch: tuple[int, ...]) -> jax.Array:
    y = jax.ShapeDtypeStruct((x_TD.shape[0], num_outputs), jnp.float32)
    return jax.ffi.ffi_call(name, (y, *(jax.ShapeDtypeStruct((size,), jnp.uint8) for size in scratch)))(x_TD, weight)[0]


def serves_int8(weight_OD: jax.Array) -> bool:
    """Whether `linear_int8` can take this."""
    return weight_OD.shape[0] % 32 == 0 and weight_OD.shape[1] % 64 == 0 and why_no_tiles() is None


def linear_int8(x_TD: jax.Array, weight_OD: jax.Array, scales_O: jax.Array, is_gated: bool = False) -> jax.Array:
    """f32[T, O] = x @ (weight * scales).T of x f32[T, D] in two int8 digits; gated: f32[T, O / 2], silu of its first half times
    the second.  On CPU only, where `serves_int8`."""
    from pallas_kernels.cpu.linear_int8 import scratch_bytes

    num_rows, depth = x_TD.shape
    y = jax.ShapeDtypeStruct((num_rows, weight_OD.shape[0] // (2 if is_gated else 1)), jnp.float32)
    scratch = jax.ShapeDtypeStruct((scratch_bytes(num_rows, depth),), jnp.uint8)
    return jax.ffi.ffi_call(_register_int8(is_gated), (y, scratch))(x_TD, weight_OD, scales_O)[0]


def _register_int8(is_gated: bool) -> str:
    if lack := why_no_tiles():
        raise NotImplementedError(lack)
    from pallas_kernels.cpu.linear_int8 import add_linear_int8

    return compile_handler("jserve_gated_int8" if is_gated else "jserve_linear_int8", add_linear_int8, is_gated)


def register_kernels(encodings: Iterable[str]) -> None:
    """Makes the matmuls of F32, INT8 or packed weights known to XLA where this machine can run them: programs that were
    compiled earlier call them by name."""
    if why_no_tiles() is None:
        for encoding in encodings:
            if encoding == "INT8":
                _register_int8(False), _register_int8(True)
            else:
                register_matmul(encoding)


def register_matmul(encoding: str) -> str:
    """Compiles the kernel if need be; its name in XLA.  NotImplementedError says what this machine lacks."""
    if lack := why_no_tiles():  # asking is also what makes Linux grant the tiles
        raise NotImplementedError(lack)
    if encoding == "F32":
        from pallas_kernels.cpu.matmul import add_matmul

        return compile_handler("jserve_matmul_f32", add_matmul)
    from pallas_kernels.cpu.matmul_packed import add_matmul_packed

    return compile_handler(f"jserve_matmul_{encoding.lower()}", add_matmul_packed, encoding)


def paged_attention(
    q_TNH: jax.Array, k_TKL: jax.Array, v_TKL: jax.Array, pool: jax.Array, layer: jax.Array | int, geometry: tuple[jax.Array, ...],
    dtype: str,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """(f32[T, N, H], pool): k and v written into the pool in place, then attention over it; `dtype` is that of the pool's numbers,
    see `add_attention` for the arguments, of which the geometry is `row` .. `tables`."""
    from pallas_kernels.cpu.attention import scratch_bytes

    head_dim, group = q_TNH.shape[2], q_TNH.shape[1] // pool.shape[2]
    name = register_attention(dtype, head_dim, pool.shape[5] - head_dim)
    results = (
        jax.ShapeDtypeStruct(q_TNH.shape, jnp.float32),
        jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        jax.ShapeDtypeStruct((scratch_bytes(group, head_dim, num_slots()),), jnp.uint8),
    )
    call = jax.ffi.ffi_call(name, results, input_output_aliases={3: 1})
    return call(q_TNH, k_TKL, v_TKL, pool, jnp.reshape(layer, (1,)).astype(jnp.int32), *geometry)[:2]


def register_attention(dtype: str, head_dim: int, scale_bytes: int) -> str:
    """As `register_matmul`."""
    from pallas_kernels.cpu.attention import add_attention

    name = f"jserve_paged_attention_{dtype}_{head_dim}_{scale_bytes}"
    return compile_handler(name, add_attention, dtype, head_dim, scale_bytes)


def serves_scan(logits_RV: jax.Array) -> bool:
    """Whether `scan_rows` can take these."""
    return logits_RV.dtype == jnp.float32 and logits_RV.shape[1] % 64 == 0 and why_no_simd() is None


def scan_rows(logits_RV: jax.Array, shaped_RV: jax.Array, used_R: jax.Array) -> tuple[jax.Array, ...]:
    """(maximum f32[R], mass f32[R], best f32[R], best_id i32[R]); see `add_scan_rows`.  On CPU only, where `serves_scan`."""
    like = lambda dtype: jax.ShapeDtypeStruct(logits_RV.shape[:1], dtype)
    results = like(jnp.float32), like(jnp.float32), like(jnp.float32), like(jnp.int32)
    return tuple(jax.ffi.ffi_call(register_scan(), results)(logits_RV, shaped_RV, used_R.astype(jnp.int32)))


def register_scan() -> str:
    """As `register_matmul`, where `why_no_simd` has nothing to say."""
    from pallas_kernels.cpu.scan_rows import add_scan_rows

    return compile_handler("jserve_scan_rows", add_scan_rows)
