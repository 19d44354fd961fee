"""The Llama family: Llama 2 and 3, TinyLlama, SmolLM2, Mistral without a window.

Matrices are [out, in] as in checkpoints (see layers.linear), fused: four matmuls and few leaves a layer.  Fused outputs
are ordered by what a tensor-parallel split keeps together, so that a split of the output axis is a model of fewer heads:
qkv is kv-group-major (a group's query heads, its key, its value), gate_up is shard-major (a shard's gate columns, then its
up columns; one shard unless asked).  A device runs the same code with its part of the parameters and the config of its
shard (ModelConfig.shard), whose `shard_axis` says where sums over heads, ffn and vocabulary are completed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jserve.models.config import ModelConfig
from jserve.models.inputs import AttentionPlan, ForwardInputs, attention_spec
from jserve.models.layers import apply_rope, dot_precision, linear, rms_norm, rope_table
from jserve.models.quantized import QuantizedMatrix, quantized_dot, take_rows
from jserve.models.row_tiles import in_tiles
from jserve.models.run_layers import run_layers
from jserve.models.spec import Initialiser, ParamSpec, Piece, normal, ones, zeros
from jserve.parallel.split import stored_kv_heads
from pallas_kernels.paged_attention import AttentionSpec, paged_attention, prepare


@flax.struct.dataclass
class LlamaLayers:
    """All layers, stacked on axis 0.  Q = K * (G + 2) * H: G query heads, a key and a value for each of K kv heads."""

    attention_norm: jax.Array  # [L, D]
    qkv: jax.Array  # [L, Q, D]
    qkv_bias: jax.Array | None  # [L, Q]
    attention_out: jax.Array  # [L, D, N * H]
    attention_out_bias: jax.Array | None  # [L, D]
    mlp_norm: jax.Array  # [L, D]
    gate_up: jax.Array  # [L, 2 * F, D]
    gate_up_bias: jax.Array | None  # [L, 2 * F]
    down: jax.Array  # [L, D, F]
    down_bias: jax.Array | None  # [L, D]


@flax.struct.dataclass
class LlamaParams:
    embedding: jax.Array  # [V, D]
    layers: LlamaLayers
    final_norm: jax.Array  # [D]
    head: jax.Array | None  # [V, D]; None: tied to the embedding


@flax.struct.dataclass
class StepContext:
    """What every layer of a step reads: computed once."""

    attention: Any  # metadata of paged attention
    rope: tuple[jax.Array, jax.Array]
    num_tokens: jax.Array  # i32[], without padding


def forward(
    params: LlamaParams,
    config: ModelConfig,
    pools: tuple[jax.Array, ...],
    inputs: ForwardInputs,
    attention: AttentionPlan,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """One step over T flat tokens: (hidden [T, D] after the final norm, pools with this step's keys and values).

    Writes the pools in place where the caller donates them.  Rows of padding tokens are unspecified.  `begin`, `layer`
    and `finish` are its parts, for callers that run a program a layer.
    """

    def one_layer(carry: tuple[jax.Array, tuple], weights: LlamaLayers, index: jax.Array | int):
        return layer(weights, config, index, *carry, context, attention)

    hidden_TD, context = begin(params, config, inputs, attention)
    hidden_TD, pools = run_layers(one_layer, (hidden_TD, pools), params.layers, attention.platform)
    return finish(params, config, hidden_TD), pools


def begin(
    params: LlamaParams, config: ModelConfig, inputs: ForwardInputs, attention: AttentionPlan
) -> tuple[jax.Array, StepContext]:
    """Hidden [T, D] before the first layer, and what all layers read."""
    (layout,), (batch,) = attention.layouts, inputs.batches
    spec = _spec(config, attention)
    metadata = prepare(batch, inputs.token_ids.shape[0], layout, spec, attention.implementation)
    rope = rope_table(config.rope, config.head_dim, inputs.positions)
    hidden_TD = take_rows(
        params.embedding, inputs.token_ids, params.final_norm.dtype, _vocab_axis(params.embedding, config)
    )
    return hidden_TD, StepContext(metadata, rope, batch.cu_q_lens[-1])


def layer(
    weights: LlamaLayers,
    config: ModelConfig,
    index: jax.Array | int,
    hidden_TD: jax.Array,
    pools: tuple[jax.Array, ...],
    context: StepContext,
    attention: AttentionPlan,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Hidden and pools after layer `index`, whose weights have no layer axis."""
    (layout,), (pool,) = attention.layouts, pools

    def before_attention(hidden_TD, rope):
        return _qkv(rms_norm(hidden_TD, weights.attention_norm, config.norm_eps), weights, config, rope)

    def after_attention(hidden_TD, heads_TD):
        hidden_TD = hidden_TD + linear(
            heads_TD, weights.attention_out, weights.attention_out_bias, sum_over=config.shard_axis
        )
        x_TD = rms_norm(hidden_TD, weights.mlp_norm, config.norm_eps)
        return hidden_TD + _mlp(x_TD, weights, config.shard_axis)

    in_rows = functools.partial(in_tiles, num_rows=context.num_tokens, tile=attention.row_tile)
    q_TNH, k_TKH, v_TKH = in_rows(before_attention, hidden_TD, context.rope)
    heads_TNH, pool = paged_attention(
        q_TNH, k_TKH, v_TKH, pool, index, context.attention,
        layout=layout, spec=_spec(config, attention), implementation=attention.implementation,
    )  # fmt: skip
    heads_TD = heads_TNH.reshape(heads_TNH.shape[0], -1)
    return in_rows(after_attention, hidden_TD, heads_TD), (pool,)


def finish(params: LlamaParams, config: ModelConfig, hidden_TD: jax.Array) -> jax.Array:
    """Hidden [T, D] after the final norm."""
    return rms_norm(hidden_TD, params.final_norm, config.norm_eps)


def _spec(config: ModelConfig, attention: AttentionPlan) -> AttentionSpec:
    (group,) = config.layer_groups
    return attention_spec(config, group, attention.decode_only)


def logits(params: LlamaParams, config: ModelConfig, hidden_RD: jax.Array) -> jax.Array:
    """f32[R, V] of the rows that are sampled or scored."""
    head_VD = params.embedding if params.head is None else params.head
    if isinstance(head_VD, QuantizedMatrix):
        logits_RV = quantized_dot(hidden_RD, head_VD)
    else:
        precision = dot_precision(hidden_RD.dtype)
        logits_RV = jnp.einsum(
            "RD,VD->RV", hidden_RD, head_VD, precision=precision, preferred_element_type=jnp.float32
        )
    axis = _vocab_axis(head_VD, config)
    return logits_RV if axis is None else jax.lax.all_gather(logits_RV, axis, axis=1, tiled=True)


def _vocab_axis(table: jax.Array | QuantizedMatrix, config: ModelConfig) -> str | None:
    """The mesh axis over which an embedding or head is split; None: it is whole here."""
    rows = table.values if isinstance(table, QuantizedMatrix) else table
    return None if rows.shape[0] == config.vocab_size else config.shard_axis


def _qkv(x_TD: jax.Array, weights: LlamaLayers, config: ModelConfig, rope: tuple[jax.Array, jax.Array]):
    """q [T, N, H] and k [T, K, H], rotated, and v [T, K, H], out of one matmul."""
    group = config.q_per_kv
    qkv_TQ = linear(x_TD, weights.qkv, weights.qkv_bias)
    qkv_TKGH = qkv_TQ.reshape(x_TD.shape[0], -1, group + 2, config.head_dim)
    rotated_TKGH = apply_rope(qkv_TKGH[:, :, : group + 1], rope)
    q_TNH = rotated_TKGH[:, :, :group].reshape(x_TD.shape[0], -1, config.head_dim)
    return q_TNH, rotated_TKGH[:, :, group], qkv_TKGH[:, :, group + 1]


def _mlp(x_TD: jax.Array, weights: LlamaLayers, sum_over: str | None = None) -> jax.Array:
    gate_TF, up_TF = jnp.split(linear(x_TD, weights.gate_up, weights.gate_up_bias), 2, axis=-1)
    return linear(jax.nn.silu(gate_TF) * up_TF, weights.down, weights.down_bias, sum_over)


def param_specs(
    config: ModelConfig, dtype: np.dtype | str, num_shards: int = 1, quantize: str | None = None
) -> LlamaParams:
    """The spec tree.  `num_shards` is the number of parts that a split of heads and ffn makes (it orders gate_up, and
    repeats kv heads where there are fewer); `quantize` "int8" makes every matrix a QuantizedMatrix, norms and biases stay
    in `dtype`."""
    dtype, is_int8 = jnp.dtype(dtype), quantize == "int8"
    config.shard(num_shards, None)  # refuses what does not divide
    L, D, N, H = config.num_layers, config.d_model, config.num_heads, config.head_dim
    F, V, K = config.d_ff, config.vocab_size, stored_kv_heads(config.num_kv_heads, num_shards)
    G, num_copies = N // K, K // config.num_kv_heads

    def stacked(
        shape: tuple[int, ...], axes: tuple[str, ...], pieces: tuple[Piece, ...], init: Initialiser = normal
    ) -> ParamSpec:
        names = tuple(dataclasses.replace(piece, name=f"model.layers.{{layer}}.{piece.name}") for piece in pieces)
        quantized = is_int8 and len(shape) == 2
        return ParamSpec((L, *shape), dtype, ("layers", *axes), init, names, stacked=True, quantized=quantized)

    def qkv(kind: str) -> tuple[Piece, ...]:
        q, k, v = (f"self_attn.{name}_proj.{kind}" for name in "qkv")
        key, value, end = G * H, (G + 1) * H, (G + 2) * H
        units = config.num_kv_heads
        return Piece(q, K, 0, key), Piece(k, units, key, value, num_copies), Piece(v, units, value, end, num_copies)

    def gate_up(kind: str) -> tuple[Piece, ...]:
        width = F // num_shards
        return (
            Piece(f"mlp.gate_proj.{kind}", num_shards, 0, width),
            Piece(f"mlp.up_proj.{kind}", num_shards, width, 2 * width),
        )

    def bias(present: bool, size: int, axis: str, pieces: tuple[Piece, ...]) -> ParamSpec | None:
        return stacked((size,), (axis,), pieces, zeros) if present else None

    def table(name: str) -> ParamSpec:
        return ParamSpec((V, D), dtype, ("vocab", "embed"), normal, (Piece(name),), quantized=is_int8)

    return LlamaParams(
        embedding=table("model.embed_tokens.weight"),
        layers=LlamaLayers(
            attention_norm=stacked((D,), ("embed",), (Piece("input_layernorm.weight"),), ones),
            qkv=stacked((K * (G + 2) * H, D), ("kv_heads", "embed"), qkv("weight")),
            qkv_bias=bias(config.qkv_bias, K * (G + 2) * H, "kv_heads", qkv("bias")),
            attention_out=stacked((D, N * H), ("embed", "heads"), (Piece("self_attn.o_proj.weight"),)),
            attention_out_bias=bias(config.attention_out_bias, D, "embed", (Piece("self_attn.o_proj.bias"),)),
            mlp_norm=stacked((D,), ("embed",), (Piece("post_attention_layernorm.weight"),), ones),
            gate_up=stacked((2 * F, D), ("ffn", "embed"), gate_up("weight")),
            gate_up_bias=bias(config.mlp_bias, 2 * F, "ffn", gate_up("bias")),
            down=stacked((D, F), ("embed", "ffn"), (Piece("mlp.down_proj.weight"),)),
            down_bias=bias(config.mlp_bias, D, "embed", (Piece("mlp.down_proj.bias"),)),
        ),
        final_norm=ParamSpec((D,), dtype, ("embed",), ones, (Piece("model.norm.weight"),)),
        head=None if config.tied else table("lm_head.weight"),
    )
