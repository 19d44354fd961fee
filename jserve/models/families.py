"""What an HF architecture adds to the plain Llama: read from its `config.json` into keyword arguments of `ModelConfig`.

Defaults are those of transformers' config classes, for configs leave out what equals them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jserve.models import rope as rope_settings
from jserve.models.fields import ModelError, check_size, mapping, number, size

Settings = Mapping[str, Any]
_WINDOWED, _FULL = "sliding_attention", "full_attention"


def _llama(config: Settings) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    mlp_bias = bool(config.get("mlp_bias", False))
    return _silu(config) | {"qkv_bias": bias, "attention_out_bias": bias, "mlp_bias": mlp_bias}


def _mistral(config: Settings) -> dict[str, Any]:
    return _silu(config) | {"sliding_window": _window(config)}


def _qwen2(config: Settings) -> dict[str, Any]:
    return _silu(config) | {"qkv_bias": True} | _qwen_windows(config)


def _qwen3(config: Settings) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return _silu(config) | {"qkv_bias": bias, "attention_out_bias": bias, "qk_norm": True} | _qwen_windows(config)


def _gemma2(config: Settings) -> dict[str, Any]:
    return _gemma(config, period=2) | {
        "attention_soft_cap": _soft_cap(config, "attn_logit_softcapping", 50.0),
        "logit_soft_cap": _soft_cap(config, "final_logit_softcapping", 30.0),
    }


def _gemma3(config: Settings) -> dict[str, Any]:
    by_kind = mapping(config, "rope_parameters")
    if _FULL in by_kind or _WINDOWED in by_kind:
        full, local = mapping(by_kind, _FULL), mapping(by_kind, _WINDOWED)
    else:
        full = {"rope_theta": config.get("rope_theta"), **mapping(config, "rope_scaling"), **by_kind}
        local = {"rope_theta": config.get("rope_local_base_freq")}
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(key) is not None:
            raise ModelError(f"{key} = {config[key]!r}: not built for Gemma 3, whose published models have none")
    return _gemma(config, period=config.get("sliding_window_pattern") or 6) | {
        "qk_norm": True,
        "rope": _rope(config, full, 1_000_000.0),
        "local_rope": _rope(config, local, 10_000.0),
    }


FAMILIES: Mapping[str, tuple[str, Callable[[Settings], dict[str, Any]]]] = MappingProxyType(
    {
        "LlamaForCausalLM": ("llama", _llama),
        "MistralForCausalLM": ("llama", _mistral),
        "Qwen2ForCausalLM": ("qwen2", _qwen2),
        "Qwen3ForCausalLM": ("qwen3", _qwen3),
        "Gemma2ForCausalLM": ("gemma2", _gemma2),
        "Gemma3ForCausalLM": ("gemma3", _gemma3),
    }
)
"""Architecture -> (family, what it adds)."""
KV_HEADS = MappingProxyType({"MistralForCausalLM": 8, "Gemma2ForCausalLM": 4, "Gemma3ForCausalLM": 4})
"""num_key_value_heads where the config does not say; of others, as many as heads."""
HEAD_DIM = MappingProxyType({"Qwen3ForCausalLM": 128, "Gemma2ForCausalLM": 256, "Gemma3ForCausalLM": 256})
TIED = frozenset({"Gemma2ForCausalLM", "Gemma3ForCausalLM"})
"""tie_word_embeddings is true where the config does not say."""
CONTEXT = MappingProxyType({"Gemma2ForCausalLM": 8192, "Gemma3ForCausalLM": 131072})


def _silu(config: Settings) -> dict[str, Any]:
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(f"hidden_act = {config['hidden_act']!r}: not built; silu is")
    return {}


def _gemma(config: Settings, period: int) -> dict[str, Any]:
    """Norms by 1 + weight and behind attention and MLP too, a gated GELU, scaled embeddings and queries, windows in all
    layers but every `period`-th."""
    activation = config.get("hidden_activation") or config.get("hidden_act") or "gelu_pytorch_tanh"
    if activation != "gelu_pytorch_tanh":
        raise ModelError(f"hidden_activation = {activation!r}: not built; gelu_pytorch_tanh is")
    if config.get("use_bidirectional_attention"):
        raise ModelError("use_bidirectional_attention = True: attention is causal here")
    bias = bool(config.get("attention_bias", False))
    kinds = [_FULL if (layer + 1) % period == 0 else _WINDOWED for layer in range(size(config, "num_hidden_layers"))]
    return {
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "activation": "gelu_tanh",
        "norm_adds_one": True,
        "post_norms": True,
        "embedding_scale": size(config, "hidden_size") ** 0.5,
        "query_scale": number(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        **_windows(config, kinds, _window(config)),
    }


def _qwen_windows(config: Settings) -> dict[str, Any]:
    if not config.get("use_sliding_window", False) or (window := _window(config)) is None:
        return {}
    first = config.get("max_window_layers", 28)
    kinds = [_WINDOWED if layer >= first else _FULL for layer in range(size(config, "num_hidden_layers"))]
    return _windows(config, kinds, window)


def _windows(config: Settings, default_kinds: list[str], window: int | None) -> dict[str, Any]:
    """`sliding_window` and `windowed_layers`; layer_types decides where the config has it."""
    kinds = config.get("layer_types") or default_kinds
    if len(kinds) != len(default_kinds) or not {_WINDOWED, _FULL}.issuperset(kinds):
        raise ModelError(f"layer_types = {kinds!r}: expected {len(default_kinds)} of {_FULL}, {_WINDOWED}")
    if window is None or _WINDOWED not in kinds:
        return {}
    return {"sliding_window": window, "windowed_layers": tuple(kind == _WINDOWED for kind in kinds)}


def _window(config: Settings) -> int | None:
    window = config.get("sliding_window", 4096)  # HF's default for a missing key
    return None if window is None else check_size("sliding_window", window)


def _soft_cap(config: Settings, key: str, default: float) -> float | None:
    return None if config.get(key, default) is None else number(config, key, default)


def _rope(config: Settings, settings: Settings, theta: float) -> rope_settings.RopeScaling:
    known = {key: value for key, value in settings.items() if value is not None}
    longest = config.get("max_position_embeddings")
    return rope_settings.from_hf({"max_position_embeddings": longest, "rope_parameters": {"rope_theta": theta, **known}})
