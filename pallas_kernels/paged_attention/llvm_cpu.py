"""Paged attention on CPU by a kernel of our own (pallas_kernels/cpu): float32, AVX-512.  The KV write is XLA's.

For decodes of 64 rows XLA's loops take three times the time that reading keys and values does; the kernel takes little more.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.cpu.ops import attention, register_attention, why_no_simd
from pallas_kernels.paged_attention.batch import AttentionSpec, RaggedBatch, token_rows
from pallas_kernels.paged_attention.layout import PoolLayout, pack
from pallas_kernels.paged_attention.xla_write import Writes, plan_writes, write


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metadata:
    writes: Writes
    row: jax.Array  # i32[T]
    first: jax.Array  # i32[T]: the first key that a token sees
    length: jax.Array  # i32[T]: behind the last one; 0 for padding
    tables: jax.Array  # i32[S, blocks]


def validate(layout: PoolLayout, spec: AttentionSpec) -> None:
    """Float32 pools of plain layout; raises NotImplementedError with what is not served, or what the machine lacks."""
    if layout.platform != "cpu":
        raise NotImplementedError(f"for pools of the CPU's layout, not of {layout.platform}'s")
    if layout.storage_dtype != jnp.float32 or layout.planes != 2 or layout.lanes != layout.head_dim:
        raise NotImplementedError(f"the KV dtype {jnp.dtype(layout.dtype).name} is not float32")
    if layout.head_dim % 16 or layout.block_size % 16:
        raise NotImplementedError(f"head_dim {layout.head_dim} and block size {layout.block_size}: multiples of 16 only")
    if spec.soft_cap is not None or spec.has_sinks:
        raise NotImplementedError("no logit soft cap and no sinks")
    if lack := why_no_simd():
        raise NotImplementedError(lack)
    register_attention(layout.head_dim)


def prepare(batch: RaggedBatch, num_tokens: int, layout: PoolLayout, spec: AttentionSpec) -> Metadata:
    tokens = token_rows(batch, num_tokens, layout.block_size, spec)
    length = tokens.position + 1
    first = jnp.zeros_like(length) if spec.sliding_window is None else jnp.maximum(length - spec.sliding_window, 0)
    writes = plan_writes(batch, num_tokens, layout, spec)
    return Metadata(writes, tokens.row, first, length, batch.block_tables)


def attend(q, k, v, pool, layer, metadata: Metadata, *, layout, spec, sinks=None, k_scale=None, v_scale=None):
    pool = write(pool, layer, metadata.writes, pack(k, v, layout, k_scale, v_scale))
    scale = spec.scale if k_scale is None else spec.scale * _of_heads(k_scale, q, layout)
    scaled = q.astype(jnp.float32) * scale
    out = attention(scaled, pool, layer, metadata.row, metadata.first, metadata.length, metadata.tables)
    if v_scale is not None:
        out = out * _of_heads(v_scale, q, layout)
    return out.astype(q.dtype), pool


def _of_heads(scale: jax.Array, q: jax.Array, layout: PoolLayout) -> jax.Array:
    """A scale, or one a kv head, as f32[N, 1]."""
    of_kv_heads = jnp.broadcast_to(jnp.asarray(scale, jnp.float32), (layout.num_kv_heads,))
    return jnp.repeat(of_kv_heads, q.shape[1] // layout.num_kv_heads)[:, None]
