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

from jserve.models import families
from jserve.models import rope as rope_settings
from jserve.models.fields import ModelError, check_size, mapping, number, size, token_ids
from jserve.models.rope import RopeScaling
from jserve.parallel import split

__all__ = ["LayerGroup", "ModelConfig", "ModelError", "RopeScaling", "from_gguf", "from_hf"]


@dataclass(frozen=True)
class LayerGroup:
    """Layers that need the same cache and so share one pool and one block table a sequence."""

    layers: tuple[int, ...]
    """Their numbers, ascending."""
    sliding_window: int | None

    @property
    def num_layers(self) -> int:
        return len(self.layers)


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
    qk_norm: bool = False
    """Each head's query and key are normalised before they are rotated."""
    sliding_window: int | None = None
    windowed_layers: tuple[bool, ...] | None = None
    """Which layers have the sliding window; None: all of them, if there is one."""
    local_rope: RopeScaling | None = None
    """Of layers with the window, where theirs is another."""
    activation: str = "silu"
    """silu or gelu_tanh, of the gate."""
    norm_adds_one: bool = False
    """Norms multiply by 1 + weight, in float32."""
    post_norms: bool = False
    """Attention and MLP are normalised again before they are added to the hidden state."""
    embedding_scale: float | None = None
    query_scale: float | None = None
    """Factor on q.k; None: head_dim ** -0.5."""
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    shard_axis: str | None = None
    """Set in a shard's config: the mesh axis across which its partial results are joined."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        sizes = "num_layers d_model num_heads num_kv_heads head_dim d_ff vocab_size context_length"
        for name in sizes.split():
            check_size(name, getattr(self, name))
        if self.sliding_window is not None:
            check_size("sliding_window", self.sliding_window)
        if self.windowed_layers is not None and len(self.windowed_layers) != self.num_layers:
            raise ModelError(f"windowed_layers of {len(self.windowed_layers)} layers, but there are {self.num_layers}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} heads cannot share {self.num_kv_heads} kv heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"head_dim = {self.head_dim}: rotary embedding needs an even one")

    @property
    def q_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """Full attention first."""
        if self.sliding_window is None:
            return (LayerGroup(tuple(range(self.num_layers)), None),)
        windowed = self.windowed_layers or (True,) * self.num_layers
        full, local = (tuple(at for at, one in enumerate(windowed) if one is kind) for kind in (False, True))
        groups = (LayerGroup(full, None), LayerGroup(local, self.sliding_window))
        return tuple(group for group in groups if group.layers)

    @property
    def group_of_layers(self) -> tuple[int, ...]:
        """Of each layer the number of its group; its place there is how many of the group come before it."""
        numbers = {layer: number for number, group in enumerate(self.layer_groups) for layer in group.layers}
        return tuple(numbers[layer] for layer in range(self.num_layers))

    def shard(self, num_shards: int, axis: str | None) -> ModelConfig:
        """The model as one of `num_shards` devices sees it: a model of fewer heads and a narrower ffn, whose sums over
        those are completed across `axis`.  ModelError where it does not divide."""
        if num_shards == 1:
            return self
        sizes = {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads, "d_ff": self.d_ff}
        if reason := split.why_not(num_shards, **sizes):
            raise ModelError(f"tensor_parallel_size = {num_shards}: {reason}")
        return dataclasses.replace(
            self,
            num_heads=self.num_heads // num_shards,
            num_kv_heads=split.stored_kv_heads(self.num_kv_heads, num_shards) // num_shards,
            d_ff=self.d_ff // num_shards,
            shard_axis=axis,
        )

    def with_context_length(self, length: int | None) -> ModelConfig:
        """This model with a shorter context; None leaves it.  A window that then covers it all no longer matters."""
        length = self.context_length if length is None else length
        if not 1 <= length <= self.context_length:
            raise ModelError(f"context_length = {length}: this model was made for 1 to {self.context_length}")
        window = self.sliding_window
        if window is not None and window >= length and self.windowed_layers is None:
            window = None
        return dataclasses.replace(self, context_length=length, sliding_window=window)


_GGUF_FAMILIES = MappingProxyType({"llama": "llama"})


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The model that an HF `config.json` describes.  ModelError names what is missing, wrong or not built."""
    architectures = config.get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else None
    if architecture not in families.FAMILIES:
        raise ModelError(f"architectures = {architectures!r}: not built; {', '.join(families.FAMILIES)} are")
    if quantisation := mapping(config, "quantization_config"):
        raise ModelError(f"quantization_config: {quantisation.get('quant_method')} checkpoints are not built")
    family, read_family = families.FAMILIES[architecture]
    special = read_family(config)
    num_heads, d_model = size(config, "num_attention_heads"), size(config, "hidden_size")
    rope = special.pop("rope", None) or rope_settings.from_hf(config)
    context_length = size(config, "max_position_embeddings", families.CONTEXT.get(architecture))
    if rope.kind == "linear" and family != "gemma3":  # as vLLM reads it: the field is the context before stretching
        context_length = int(context_length * rope.factor)
    return ModelConfig(
        family=family,
        architecture=architecture,
        num_layers=size(config, "num_hidden_layers"),
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=size(config, "num_key_value_heads", families.KV_HEADS.get(architecture, num_heads)),
        head_dim=size(config, "head_dim", families.HEAD_DIM.get(architecture, d_model // num_heads)),
        d_ff=size(config, "intermediate_size"),
        vocab_size=size(config, "vocab_size"),
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        rope=rope,
        tied=bool(config.get("tie_word_embeddings", architecture in families.TIED)),
        context_length=context_length,
        bos_token_id=next(iter(token_ids(config, "bos_token_id")), None),
        eos_token_ids=token_ids(config, "eos_token_id"),
        **special,
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
    family = _GGUF_FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        raise ModelError(f"general.architecture = {architecture!r}: not built; {', '.join(_GGUF_FAMILIES)} is")
    if "token_embd.weight" not in tensor_shapes:
        raise ModelError("the tensor token_embd.weight is missing")
    prefix = f"{architecture}."
    if fields.get(prefix + "expert_count"):
        raise ModelError(f"{prefix}expert_count = {fields[prefix + 'expert_count']}: experts are not built")
    d_model, num_heads = size(fields, prefix + "embedding_length"), _heads(fields, prefix + "attention.head_count")
    head_dim = size(fields, prefix + "attention.key_length", d_model // num_heads)
    for key in (prefix + "attention.value_length", prefix + "rope.dimension_count"):
        if fields.get(key, head_dim) != head_dim:
            raise ModelError(f"{key} = {fields[key]}: only {head_dim}, the key length, is built")
    layer_tensors = {name.removeprefix("blk.0.") for name in tensor_shapes if name.startswith("blk.0.")}
    ends = (token_ids(fields, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return ModelConfig(
        family=family,
        architecture=architecture,
        num_layers=size(fields, prefix + "block_count"),
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=_heads(fields, prefix + "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        d_ff=size(fields, prefix + "feed_forward_length"),
        vocab_size=tensor_shapes["token_embd.weight"][0],
        norm_eps=number(fields, prefix + "attention.layer_norm_rms_epsilon"),
        rope=rope_settings.from_gguf(fields, architecture, rope_divisors, head_dim),
        tied="output.weight" not in tensor_shapes,
        context_length=size(fields, prefix + "context_length"),
        qkv_bias="attn_q.bias" in layer_tensors,
        attention_out_bias="attn_output.bias" in layer_tensors,
        mlp_bias="ffn_gate.bias" in layer_tensors,
        sliding_window=fields.get(prefix + "attention.sliding_window") or None,
        bos_token_id=next(iter(token_ids(fields, "tokenizer.ggml.bos_token_id")), None),
        eos_token_ids=tuple(dict.fromkeys(token_id for ids in ends for token_id in ids)),
    )


def _heads(fields: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """One number, or a list of the same number for each layer."""
    value = fields.get(key)
    if not isinstance(value, list):
        return size(fields, key, default)
    if len(set(value)) != 1:
        raise ModelError(f"{key} = {value}: heads that differ by layer are not built")
    return check_size(key, value[0])
