"""The Llama family and its relatives: Llama 2 and 3, SmolLM2, Mistral; Qwen 2 and 3; Gemma 2 and 3, text only.

What one of them lacks is None or off in its config, and then neither in the tree nor in the program.

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
from jserve.models.layers import apply_rope, cpu_kernel_or, dot_precision, linear, rms_norm, rope_table
from jserve.models.packed import PackedMatrix, packed_dot
from jserve.models.quantized import QuantizedMatrix, gated_dot, quantized_dot, take_rows
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
    q_norm: jax.Array | None  # [L, H]
    k_norm: jax.Array | None  # [L, H]
    attention_out: jax.Array  # [L, D, N * H]
    attention_out_bias: jax.Array | None  # [L, D]
    attention_post_norm: jax.Array | None  # [L, D]
    mlp_norm: jax.Array  # [L, D]
    gate_up: jax.Array  # [L, 2 * F, D]
    gate_up_bias: jax.Array | None  # [L, 2 * F]
    down: jax.Array  # [L, D, F]
    down_bias: jax.Array | None  # [L, D]
    mlp_post_norm: jax.Array | None  # [L, D]


@flax.struct.dataclass
class LlamaParams:
    embedding: jax.Array  # [V, D]
    layers: LlamaLayers
    final_norm: jax.Array  # [D]
    head: jax.Array | None  # [V, D]; None: tied to the embedding


@flax.struct.dataclass
class GroupContext:
    """What every layer of a group reads in a step: computed once."""

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

    def one_layer(carry: tuple[jax.Array, tuple], weights: LlamaLayers, group: int, place: jax.Array | int):
        hidden_TD, pools = carry
        hidden_TD, pool = layer(weights, config, group, place, hidden_TD, pools[group], contexts[group], attention)
        return hidden_TD, (*pools[:group], pool, *pools[group + 1 :])

    hidden_TD, contexts = begin(params, config, inputs, attention)
    carry = run_layers(one_layer, (hidden_TD, pools), params.layers, config.group_of_layers, attention.platform)
    return finish(params, config, carry[0]), carry[1]


def begin(
    params: LlamaParams, config: ModelConfig, inputs: ForwardInputs, attention: AttentionPlan
) -> tuple[jax.Array, tuple[GroupContext, ...]]:
    """Hidden [T, D] before the first layer, and what the layers of each group read."""
    num_tokens = inputs.token_ids.shape[0]
    contexts = []
    for number, (layout, batch) in enumerate(zip(attention.layouts, inputs.batches)):
        metadata = prepare(batch, num_tokens, layout, _spec(config, number, attention), attention.implementation)
        is_local = config.layer_groups[number].sliding_window is not None and config.local_rope is not None
        rope = config.local_rope if is_local else config.rope
        table = rope_table(rope, config.head_dim, inputs.positions)
        contexts.append(GroupContext(metadata, table, batch.cu_q_lens[-1]))
    hidden_TD = take_rows(
        params.embedding, inputs.token_ids, params.final_norm.dtype, _vocab_axis(params.embedding, config)
    )
    if config.embedding_scale is not None:
        hidden_TD = hidden_TD * jnp.asarray(config.embedding_scale, hidden_TD.dtype)
    return hidden_TD, tuple(contexts)


def layer(
    weights: LlamaLayers,
    config: ModelConfig,
    group: int,
    place: jax.Array | int,
    hidden_TD: jax.Array,
    pool: jax.Array,
    context: GroupContext,
    attention: AttentionPlan,
) -> tuple[jax.Array, jax.Array]:
    """Hidden, and the group's pool, after the layer at `place` of a group, whose weights have no layer axis."""

    def before_attention(hidden_TD, rope):
        return _qkv(_norm(hidden_TD, weights.attention_norm, config), weights, config, rope)

    def after_attention(hidden_TD, heads_TD):
        y_TD = linear(heads_TD, weights.attention_out, weights.attention_out_bias, sum_over=config.shard_axis)
        hidden_TD = hidden_TD + _post_norm(y_TD, weights.attention_post_norm, config)
        y_TD = _mlp(_norm(hidden_TD, weights.mlp_norm, config), weights, config)
        return hidden_TD + _post_norm(y_TD, weights.mlp_post_norm, config)

    in_rows = functools.partial(in_tiles, num_rows=context.num_tokens, tile=attention.row_tile)
    q_TNH, k_TKH, v_TKH = in_rows(before_attention, hidden_TD, context.rope)
    heads_TNH, pool = paged_attention(
        q_TNH, k_TKH, v_TKH, pool, place, context.attention,
        layout=attention.layouts[group], spec=_spec(config, group, attention), implementation=attention.implementation,
    )  # fmt: skip
    heads_TD = heads_TNH.reshape(heads_TNH.shape[0], -1)
    return in_rows(after_attention, hidden_TD, heads_TD), pool


def finish(params: LlamaParams, config: ModelConfig, hidden_TD: jax.Array) -> jax.Array:
    """Hidden [T, D] after the final norm."""
    return _norm(hidden_TD, params.final_norm, config)


def _spec(config: ModelConfig, group: int, attention: AttentionPlan) -> AttentionSpec:
    return attention_spec(config, config.layer_groups[group], attention.decode_only)


def _norm(x: jax.Array, weight: jax.Array, config: ModelConfig) -> jax.Array:
    return rms_norm(x, weight, config.norm_eps, config.norm_adds_one)


def _post_norm(x_TD: jax.Array, weight_D: jax.Array | None, config: ModelConfig) -> jax.Array:
    return x_TD if weight_D is None else _norm(x_TD, weight_D, config)


def logits(params: LlamaParams, config: ModelConfig, hidden_RD: jax.Array) -> jax.Array:
    """f32[R, V] of the rows that are sampled or scored."""
    head_VD = params.embedding if params.head is None else params.head
    if isinstance(head_VD, QuantizedMatrix):
        logits_RV = quantized_dot(hidden_RD, head_VD)
    elif isinstance(head_VD, PackedMatrix):
        logits_RV = packed_dot(hidden_RD, head_VD)
    else:
        precision = dot_precision(hidden_RD.dtype)
        dot = functools.partial(jnp.einsum, "RD,VD->RV", precision=precision, preferred_element_type=jnp.float32)
        logits_RV = cpu_kernel_or(dot, hidden_RD, head_VD)
    if config.logit_soft_cap is not None:
        logits_RV = config.logit_soft_cap * jnp.tanh(logits_RV / config.logit_soft_cap)
    axis = _vocab_axis(head_VD, config)
    return logits_RV if axis is None else jax.lax.all_gather(logits_RV, axis, axis=1, tiled=True)


def _vocab_axis(table: jax.Array | QuantizedMatrix | PackedMatrix, config: ModelConfig) -> str | None:
    """The mesh axis over which an embedding or head is split; None: it is whole here."""
    [num_rows] = {leaf.shape[0] for leaf in jax.tree.leaves(table)}
    return None if num_rows == config.vocab_size else config.shard_axis


def _qkv(x_TD: jax.Array, weights: LlamaLayers, config: ModelConfig, rope: tuple[jax.Array, jax.Array]):
    """q [T, N, H] and k [T, K, H], rotated, and v [T, K, H], out of one matmul."""
    group = config.q_per_kv
    qkv_TQ = linear(x_TD, weights.qkv, weights.qkv_bias)
    qkv_TKGH = qkv_TQ.reshape(x_TD.shape[0], -1, group + 2, config.head_dim)
    qk_TKGH = qkv_TKGH[:, :, : group + 1]
    if weights.q_norm is not None:
        q_TKGH = _norm(qk_TKGH[:, :, :group], weights.q_norm, config)
        qk_TKGH = jnp.concatenate([q_TKGH, _norm(qk_TKGH[:, :, group:], weights.k_norm, config)], axis=2)
    rotated_TKGH = apply_rope(qk_TKGH, rope)
    q_TNH = rotated_TKGH[:, :, :group].reshape(x_TD.shape[0], -1, config.head_dim)
    return q_TNH, rotated_TKGH[:, :, group], qkv_TKGH[:, :, group + 1]


def _mlp(x_TD: jax.Array, weights: LlamaLayers, config: ModelConfig) -> jax.Array:
    is_silu = config.activation != "gelu_tanh"
    if is_silu and isinstance(weights.gate_up, QuantizedMatrix) and weights.gate_up_bias is None:
        y_TF = gated_dot(x_TD, weights.gate_up).astype(x_TD.dtype)
    else:
        gate_TF, up_TF = jnp.split(linear(x_TD, weights.gate_up, weights.gate_up_bias), 2, axis=-1)
        y_TF = (jax.nn.silu(gate_TF) if is_silu else jax.nn.gelu(gate_TF, approximate=True)) * up_TF
    return linear(y_TF, weights.down, weights.down_bias, config.shard_axis)


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

    one = zeros if config.norm_adds_one else ones

    def norm(name: str, size: int = D, axis: str = "embed", present: bool = True) -> ParamSpec | None:
        return stacked((size,), (axis,), (Piece(f"{name}.weight"),), one) if present else None

    mlp_norm = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"

    def table(name: str) -> ParamSpec:
        return ParamSpec((V, D), dtype, ("vocab", "embed"), normal, (Piece(name),), quantized=is_int8)

    return LlamaParams(
        embedding=table("model.embed_tokens.weight"),
        layers=LlamaLayers(
            attention_norm=norm("input_layernorm"),
            qkv=stacked((K * (G + 2) * H, D), ("kv_heads", "embed"), qkv("weight")),
            qkv_bias=bias(config.qkv_bias, K * (G + 2) * H, "kv_heads", qkv("bias")),
            q_norm=norm("self_attn.q_norm", H, "head", config.qk_norm),
            k_norm=norm("self_attn.k_norm", H, "head", config.qk_norm),
            attention_out=stacked((D, N * H), ("embed", "heads"), (Piece("self_attn.o_proj.weight"),)),
            attention_out_bias=bias(config.attention_out_bias, D, "embed", (Piece("self_attn.o_proj.bias"),)),
            attention_post_norm=norm("post_attention_layernorm", present=config.post_norms),
            mlp_norm=norm(mlp_norm),
            gate_up=stacked((2 * F, D), ("ffn", "embed"), gate_up("weight")),
            gate_up_bias=bias(config.mlp_bias, 2 * F, "ffn", gate_up("bias")),
            down=stacked((D, F), ("embed", "ffn"), (Piece("mlp.down_proj.weight"),)),
            down_bias=bias(config.mlp_bias, D, "embed", (Piece("mlp.down_proj.bias"),)),
            mlp_post_norm=norm("post_feedforward_layernorm", present=config.post_norms),
        ),
        final_norm=ParamSpec((D,), dtype, ("embed",), one, (Piece("model.norm.weight"),)),
        head=None if config.tied else table("lm_head.weight"),
    )
