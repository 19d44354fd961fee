"""What attention on GPU is made of, whoever writes the kernels: the KV write, decode rows, chunks, sinks and scales.

    write       this step's keys and values go into their blocks: an XLA scatter, in place under donation
    decode      rows of one token attend, split over the chip and joined
    chunks      tiles of the chunks' queries attend
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.batch import AttentionSpec, RaggedBatch, TokenRows, token_rows
from pallas_kernels.paged_attention.layout import PoolLayout, pack, write_tokens
from pallas_kernels.paged_attention.query_tiles import TOKENS_PER_TILE, QueryTiles, query_tiles

MASKED = -1e30
"""A masked logit: finite, so that a row with nothing visible yet gives exp2(0) and later a factor 0, never inf - inf."""
LOG2_E = 1.4426950408889634


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GpuMetadata:
    """A step's geometry as the kernels walk it."""

    tokens: TokenRows
    tables: jax.Array  # i32[S, max_blocks]
    kv_lens: jax.Array  # i32[S]
    decode_lens: jax.Array  # i32[S]: 0 for rows that are no decode
    num_decodes: jax.Array  # i32[]: flat tokens before this one are decodes
    query_tiles: dict[int, QueryTiles]
    """By tokens a tile.  A step's geometry does not know how many query heads share a kv head: a kernel takes one of
    these, and the compiler drops the others."""


def prepare(batch: RaggedBatch, num_tokens: int, layout: PoolLayout, spec: AttentionSpec) -> GpuMetadata:
    num_rows, max_blocks = batch.block_tables.shape
    # A row longer than its table would read past it: it is a bug of the caller, and is treated as padding.
    kv_lens = jnp.where(batch.kv_lens <= max_blocks * layout.block_size, batch.kv_lens, 0)
    is_decode = spec.decode_only | (jnp.arange(num_rows) < batch.num_decodes)
    sizes = () if spec.decode_only else TOKENS_PER_TILE
    return GpuMetadata(
        tokens=token_rows(batch, num_tokens, layout.block_size, spec),
        tables=batch.block_tables,
        kv_lens=kv_lens,
        decode_lens=jnp.where(is_decode, kv_lens, 0),
        num_decodes=batch.num_decodes,
        query_tiles={size: query_tiles(batch, num_tokens, size) for size in sizes},
    )


def attend(
    decode: Callable,  # (q [R, N, lanes], pool, layer, logit_scales f32[K], tables, lens) -> (out, log_sum [R, N])
    chunks: Callable,  # (q [T, N, lanes], pool, layer, logit_scales f32[K], metadata) -> (out, log_sum [T, N])
    compute_type: jnp.dtype,
    q,
    k,
    v,
    pool,
    layer,
    metadata: GpuMetadata,
    *,
    layout: PoolLayout,
    spec: AttentionSpec,
    sinks=None,
    k_scale=None,
    v_scale=None,
):
    """See `api.paged_attention`.  `log_sum` is the natural logarithm of the softmax's denominator."""
    tokens = metadata.tokens
    pool = write_tokens(pool, layer, tokens.block, tokens.offset, pack(k, v, layout, k_scale, v_scale))
    num_tokens, num_heads, _ = q.shape
    per_head = lambda scale: jnp.repeat(jnp.broadcast_to(scale, layout.num_kv_heads), num_heads // layout.num_kv_heads)
    wide_q = jnp.pad(q.astype(compute_type), ((0, 0), (0, 0), (0, layout.lanes - layout.head_dim)))
    logit_scales = jnp.broadcast_to(jnp.float32(spec.scale) * (1 if k_scale is None else k_scale), layout.num_kv_heads)

    num_candidates = min(metadata.tables.shape[0], num_tokens)  # a decode's row and flat token have the same number
    candidates = metadata.tables[:num_candidates], metadata.decode_lens[:num_candidates]
    out, log_sum = decode(wide_q[:num_candidates], pool, layer, logit_scales, *candidates)
    if not spec.decode_only:
        chunked, chunk_log_sum = chunks(wide_q, pool, layer, logit_scales, metadata)
        is_decode = jnp.arange(num_tokens)[:, None] < metadata.num_decodes
        padding = ((0, num_tokens - num_candidates), (0, 0))
        out = jnp.where(is_decode[..., None], jnp.pad(out, (*padding, (0, 0))), chunked)
        log_sum = jnp.where(is_decode, jnp.pad(log_sum, padding), chunk_log_sum)
    if sinks is not None:  # one more term of the denominator
        out = out * jax.nn.sigmoid(log_sum - sinks.astype(jnp.float32))[..., None]
    if v_scale is not None:
        out = out * per_head(v_scale)[:, None]
    is_live = (tokens.position >= 0)[:, None, None]
    return jnp.where(is_live, out[..., : layout.head_dim], 0).astype(q.dtype), pool


def online_softmax(logits: jax.Array, total: jax.Array, largest: jax.Array):
    """(weights, new total, new largest, factor for what was accumulated)."""
    new_largest = jnp.maximum(largest, logits.max(axis=1))
    factor = jnp.exp2(largest - new_largest)
    weights = jnp.exp2(logits - lax.broadcast_in_dim(new_largest, logits.shape, [0]))
    return weights, total * factor + weights.sum(axis=1), new_largest, factor


def join_splits(out: jax.Array, log_sum: jax.Array) -> tuple[jax.Array, jax.Array]:
    """out [R, K, splits, G, lanes], log_sum [R, K, splits, G] in base 2 -> without splits, log_sum natural."""
    largest = log_sum.max(axis=2)
    weights = jnp.where(log_sum > MASKED / 2, jnp.exp2(log_sum - largest[:, :, None]), 0.0)
    total = weights.sum(axis=2)
    share = weights / jnp.maximum(total, 1e-30)[:, :, None]
    joined = (share[..., None] * out).sum(axis=2)
    return joined, jnp.where(total > 0, (largest + jnp.log2(jnp.maximum(total, 1e-30))) / LOG2_E, MASKED)
