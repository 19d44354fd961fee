"""Paged attention on CPU by a kernel of our own (pallas_kernels/cpu), with AVX-512: the KV write and the attention in
one call.

It reads pools of each dtype as they lie; what it does not serve (a logit soft cap, sinks, odd sizes) is XLA's.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.cpu import ops
from pallas_kernels.paged_attention.batch import AttentionSpec, RaggedBatch, token_rows
from pallas_kernels.paged_attention.layout import PoolLayout, stored

DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")
"""Of pools; those of 8 bits with scales."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metadata:
    row: jax.Array  # i32[T]
    first: jax.Array  # i32[T]: the first key that a token sees
    length: jax.Array  # i32[T]: behind the last one; 0 for padding
    block: jax.Array  # i32[T]: where its key and value go
    slot: jax.Array  # i32[T]
    tables: jax.Array  # i32[S, blocks]


def validate(layout: PoolLayout, spec: AttentionSpec) -> None:
    """Raises NotImplementedError with what is not served, or what the machine lacks."""
    if layout.platform != "cpu":
        raise NotImplementedError(f"for pools of the CPU's layout, not of {layout.platform}'s")
    dtype = jnp.dtype(layout.dtype).name
    if dtype not in DTYPES:
        raise NotImplementedError(f"the KV dtype {dtype} is none of {', '.join(DTYPES)}")
    if layout.head_dim % 16 or layout.block_size % 16:
        sizes = f"head_dim {layout.head_dim} and block size {layout.block_size}"
        raise NotImplementedError(f"{sizes}: multiples of 16 only")
    if spec.soft_cap is not None or spec.has_sinks:
        raise NotImplementedError("no logit soft cap and no sinks")
    if lack := ops.why_no_simd():
        raise NotImplementedError(lack)
    ops.register_attention(dtype, layout.head_dim, layout.lanes - layout.head_dim)


def prepare(batch: RaggedBatch, num_tokens: int, layout: PoolLayout, spec: AttentionSpec) -> Metadata:
    tokens = token_rows(batch, num_tokens, layout.block_size, spec)
    length = tokens.position + 1
    first = jnp.zeros_like(length) if spec.sliding_window is None else jnp.maximum(length - spec.sliding_window, 0)
    return Metadata(tokens.row, first, length, tokens.block, tokens.offset, batch.block_tables)


def attend(q, k, v, pool, layer, metadata: Metadata, *, layout, spec, sinks=None, k_scale=None, v_scale=None):
    scale = spec.scale if k_scale is None else spec.scale * _of_heads(k_scale, q, layout)
    geometry = (metadata.row, metadata.first, metadata.length, metadata.block, metadata.slot, metadata.tables)
    out, pool = ops.paged_attention(
        q.astype(jnp.float32) * scale, stored(k, layout, k_scale), stored(v, layout, v_scale), pool, layer, geometry,
        jnp.dtype(layout.dtype).name,
    )  # fmt: skip
    if v_scale is not None:
        out = out * _of_heads(v_scale, q, layout)
    return out.astype(q.dtype), pool


def _of_heads(scale: jax.Array, q: jax.Array, layout: PoolLayout) -> jax.Array:
    """A scale, or one a kv head, as f32[N, 1]."""
    of_kv_heads = jnp.broadcast_to(jnp.asarray(scale, jnp.float32), (layout.num_kv_heads,))
    return jnp.repeat(of_kv_heads, q.shape[1] // layout.num_kv_heads)[:, None]
