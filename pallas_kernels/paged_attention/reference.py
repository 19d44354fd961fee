"""The oracle: attention of one token at a time over its whole context, float32, any shape and layout.  Slow on purpose.

Every other implementation is compared with this one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.batch import AttentionSpec, RaggedBatch, TokenRows, token_rows
from pallas_kernels.paged_attention.layout import PoolLayout, pack, unpack, write_tokens


def validate(layout: PoolLayout, spec: AttentionSpec) -> None:
    """Everything is supported."""


def prepare(
    batch: RaggedBatch, num_tokens: int, layout: PoolLayout, spec: AttentionSpec
) -> tuple[RaggedBatch, TokenRows]:
    return batch, token_rows(batch, num_tokens, layout.block_size, spec)


def attend(q, k, v, pool, layer, metadata, *, layout, spec, sinks=None, k_scale=None, v_scale=None):
    batch, tokens = metadata
    pool = write_tokens(pool, layer, tokens.block, tokens.offset, pack(k, v, layout, k_scale, v_scale))

    def one_token(token):
        q_NH, row, position = token
        keys_KCH, values_KCH = (
            jnp.moveaxis(x, 1, 0).reshape(layout.num_kv_heads, -1, layout.head_dim)
            for x in unpack(pool[layer, batch.block_tables[row]], layout, k_scale, v_scale)
        )
        q_KGH = q_NH.astype(jnp.float32).reshape(layout.num_kv_heads, -1, layout.head_dim)
        logits_KGC = jnp.einsum("KGH,KCH->KGC", q_KGH, keys_KCH, precision="highest") * spec.scale
        if spec.soft_cap is not None:
            logits_KGC = spec.soft_cap * jnp.tanh(logits_KGC / spec.soft_cap)
        context = jnp.arange(keys_KCH.shape[1])
        visible = context <= position
        if spec.sliding_window is not None:
            visible &= context > position - spec.sliding_window
        logits_KGC = jnp.where(visible, logits_KGC, -jnp.inf)
        sink_KG1 = jnp.full((*logits_KGC.shape[:2], 1), -jnp.inf)
        if sinks is not None:
            sink_KG1 = sinks.astype(jnp.float32).reshape(sink_KG1.shape)
        weights_KGC = jax.nn.softmax(jnp.concatenate([logits_KGC, sink_KG1], -1), -1)[..., :-1]
        values_KCH = jnp.where(visible[:, None], values_KCH, 0)  # an unused slot may hold NaN, and 0 * NaN is NaN
        out_KGH = jnp.einsum("KGC,KCH->KGH", weights_KGC, values_KCH, precision="highest")
        return jnp.where(position >= 0, out_KGH.reshape(q_NH.shape), 0).astype(q.dtype)

    return jax.lax.map(one_token, (q, tokens.row, tokens.position)), pool
