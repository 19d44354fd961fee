"""What a model is, in numbers: read from an HF `config.json` or from GGUF metadata into one frozen `ModelConfig`.

Imports no array library.  Everything that would make the numbers wrong (an architecture, a rope type, an activation
that is not built) is refused here by name, so that model code may trust its config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


class ModelError(ValueError):
    """A model that cannot be served; the message names the setting and its value."""


@dataclass(frozen=True)
class RopeScaling:
    """Rotary embedding: the base and how its frequencies are stretched (`layers.inverse_frequencies`)."""

    theta: float = 10000.0
    kind: str = "default"
    """default; linear (all divided by factor); llama3 (low ones divided, middle ones blended); divisors (one each)."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192
    divisors: tuple[float, ...] = ()
    """GGUF's rope_freqs.weight: what each of the head_dim / 2 frequencies is divided by."""


@dataclass(frozen=True)
class LayerGroup:
    """Layers that need the same cache and so share one pool and one block table a sequence."""

    num_layers: int
    sliding_window: int | None


@dataclass(frozen=True)
class ModelConfig:
    """Hashable, so that jitted functions take it as a static argument."""

    family: str
    """Which model code runs it; see `registry`."""
    architecture: str
    """What the checkpoint calls it, e.g. LlamaForCausalLM; for messages."""
    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    vocab_size: int
    """Rows of the embedding; token ids from here on do not exist."""
    norm_eps: float
    rope: RopeScaling
    tied: bool
    """The head is the embedding."""
    context_length: int
    """Longest prompt + output in tokens that the model was made for, or what was asked for where that is less."""
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        for name in ("num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff", "vocab_size",
                     "context_length"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ModelError(f"{name} = {getattr(self, name)}: must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} heads cannot share {self.num_kv_heads} kv heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"head_dim = {self.head_dim}: rotary embedding needs an even one")

    @property
    def q_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        return (LayerGroup(self.num_layers, self.sliding_window),)

    def with_context_length(self, length: int | None) -> ModelConfig:
        """This model with a shorter context; None leaves it.  A window that then covers the context no longer matters."""
        length = self.context_length if length is None else length
        if not 1 <= length <= self.context_length:
            raise ModelError(f"context_length = {length}: this model was made for 1 to {self.context_length}")
        window = self.sliding_window
        if window is not None and window >= length:
            window = None
        return dataclasses.replace(self, context_length=length, sliding_window=window)


_HF_FAMILIES = MappingProxyType({"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama"})
_GGUF_FAMILIES = MappingProxyType({"llama": "llama"})


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The model that an HF `config.json` describes.  ModelError names what is missing, wrong or not built."""
    architecture = next(iter(config.get("architectures") or ()), None)
    family = _HF_FAMILIES.get(architecture)
    if family is None:
        raise ModelError(f"architectures = {config.get('architectures')}: not built; {', '.join(_HF_FAMILIES)} are")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unnamed")
        raise ModelError(f"quantization_config: {method} checkpoints are not built")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(f"hidden_act = {config['hidden_act']!r}: not built; silu is")
    num_heads = _required(config, "num_attention_heads")
    d_model = _required(config, "hidden_size")
    rope = _rope_from_hf(config)
    context_length = _required(config, "max_position_embeddings")
    if rope.kind == "linear":  # as vLLM reads it: the field is the context before stretching
        context_length = int(context_length * rope.factor)
    is_mistral = architecture == "MistralForCausalLM"
    attention_bias = bool(config.get("attention_bias", False)) and not is_mistral
    return ModelConfig(
        family=family,
        architecture=architecture,
        num_layers=_required(config, "num_hidden_layers"),
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or (8 if is_mistral else num_heads),
        head_dim=config.get("head_dim") or d_model // num_heads,
        d_ff=_required(config, "intermediate_size"),
        vocab_size=_required(config, "vocab_size"),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope,
        tied=bool(config.get("tie_word_embeddings", False)),
        context_length=context_length,
        qkv_bias=attention_bias,
        attention_out_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and not is_mistral,
        sliding_window=config.get("sliding_window", 4096) if is_mistral else None,  # HF's defaults for a missing key
        bos_token_id=_first(config.get("bos_token_id")),
        eos_token_ids=token_ids(config.get("eos_token_id")),
    )


def from_gguf(
    fields: Mapping[str, Any],
    tensor_shapes: Mapping[str, tuple[int, ...]],
    rope_divisors: tuple[float, ...] = (),
) -> ModelConfig:
    """The model that GGUF metadata describes.

    `tensor_shapes` (GGUF names, rows first) decide what the metadata leaves open: the rows of the embedding, whether
    there is a head, and biases.  `rope_divisors` is the content of rope_freqs.weight.
    """
    architecture = fields.get("general.architecture")
    family = _GGUF_FAMILIES.get(architecture)
    if family is None:
        raise ModelError(f"general.architecture = {architecture!r}: not built; {', '.join(_GGUF_FAMILIES)} is")

    def required(key: str) -> Any:
        return _required(fields, f"{architecture}.{key}")

    def optional(key: str, default: Any = None) -> Any:
        return fields.get(f"{architecture}.{key}", default)

    if optional("expert_count", 0):
        raise ModelError(f"{architecture}.expert_count = {optional('expert_count')}: experts are not built")
    if "token_embd.weight" not in tensor_shapes:
        raise ModelError("the tensor token_embd.weight is missing")
    num_heads, d_model = required("attention.head_count"), required("embedding_length")
    num_kv_heads = optional("attention.head_count_kv", num_heads)
    for key, value in (("head_count", num_heads), ("head_count_kv", num_kv_heads)):
        if isinstance(value, list):
            raise ModelError(f"{architecture}.attention.{key} = {value}: heads that differ by layer are not built")
    head_dim = optional("attention.key_length", d_model // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if optional(key, head_dim) != head_dim:
            raise ModelError(f"{architecture}.{key} = {optional(key)}: only {head_dim}, the key length, is built")
    layer_tensors = {name.removeprefix("blk.0.") for name in tensor_shapes if name.startswith("blk.0.")}
    return ModelConfig(
        family=family,
        architecture=architecture,
        num_layers=required("block_count"),
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        d_ff=required("feed_forward_length"),
        vocab_size=tensor_shapes["token_embd.weight"][0],
        norm_eps=float(required("attention.layer_norm_rms_epsilon")),
        rope=_rope_from_gguf(architecture, fields, rope_divisors, head_dim),
        tied="output.weight" not in tensor_shapes,
        context_length=required("context_length"),
        qkv_bias="attn_q.bias" in layer_tensors,
        attention_out_bias="attn_output.bias" in layer_tensors,
        mlp_bias="ffn_gate.bias" in layer_tensors,
        sliding_window=optional("attention.sliding_window") or None,
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(
            dict.fromkeys(
                fields[key]
                for key in (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
                if fields.get(key) is not None
            )
        ),
    )


def _rope_from_hf(config: Mapping[str, Any]) -> RopeScaling:
    """Both spellings: rope_parameters (with the base inside), and rope_scaling beside rope_theta."""
    parameters = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(parameters.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelError(f"partial_rotary_factor = {partial}: only 1.0 is built")
    if kind == "default":
        return RopeScaling(theta)
    if kind == "linear":
        return RopeScaling(theta, "linear", factor=float(_required(parameters, "factor")))
    if kind == "llama3":
        return RopeScaling(
            theta,
            "llama3",
            factor=float(_required(parameters, "factor")),
            low_freq_factor=float(_required(parameters, "low_freq_factor")),
            high_freq_factor=float(_required(parameters, "high_freq_factor")),
            original_context_length=int(
                parameters.get("original_max_position_embeddings") or _required(config, "max_position_embeddings")
            ),
        )
    raise ModelError(f"rope_type = {kind!r}: not built; default, linear and llama3 are")


def _rope_from_gguf(
    architecture: str, fields: Mapping[str, Any], divisors: tuple[float, ...], head_dim: int
) -> RopeScaling:
    theta = float(fields.get(f"{architecture}.rope.freq_base", 10000.0))
    kind = fields.get(f"{architecture}.rope.scaling.type", "none")
    factor = fields.get(f"{architecture}.rope.scaling.factor")
    if kind == "none" and fields.get(f"{architecture}.rope.scale_linear"):  # the key of older files
        kind, factor = "linear", fields[f"{architecture}.rope.scale_linear"]
    if kind not in ("none", "linear"):
        raise ModelError(f"{architecture}.rope.scaling.type = {kind!r}: not built; none and linear are")
    if divisors:
        if kind != "none":
            raise ModelError(f"rope_freqs.weight together with {architecture}.rope.scaling.type = {kind!r}: not built")
        if len(divisors) != head_dim // 2:
            raise ModelError(f"rope_freqs.weight has {len(divisors)} entries, a head of {head_dim} needs {head_dim // 2}")
        return RopeScaling(theta, "divisors", divisors=divisors)
    if kind == "linear":
        if factor is None:
            raise ModelError(f"{architecture}.rope.scaling.factor is missing")
        return RopeScaling(theta, "linear", factor=float(factor))
    return RopeScaling(theta)


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """HF writes one id, a list of ids, or null."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _first(value: int | list[int] | None) -> int | None:
    return next(iter(token_ids(value)), None)


def _required(values: Mapping[str, Any], key: str) -> Any:
    if values.get(key) is None:
        raise ModelError(f"{key} is missing")
    return values[key]
