"""How rotary frequencies are stretched, read from both formats.  `layers.inverse_frequencies` computes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jserve.models.fields import ModelError, mapping, number, size


@dataclass(frozen=True)
class RopeScaling:
    theta: float = 10000.0
    """The base."""
    kind: str = "default"
    """default; linear (all divided by factor); llama3 (low ones divided, middle ones blended); divisors (one each)."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192
    divisors: tuple[float, ...] = ()
    """GGUF's rope_freqs.weight: what each of the head_dim / 2 frequencies is divided by."""


def from_hf(config: Mapping[str, Any]) -> RopeScaling:
    """Both spellings: rope_parameters (with the base inside), and rope_scaling beside rope_theta."""
    settings = {
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": config.get("max_position_embeddings"),
        **{key: config[key] for key in ("rope_theta", "partial_rotary_factor") if config.get(key) is not None},
        **mapping(config, "rope_scaling"),
        **mapping(config, "rope_parameters"),
    }
    if settings["partial_rotary_factor"] != 1.0:
        raise ModelError(f"partial_rotary_factor = {settings['partial_rotary_factor']!r}: only 1.0 is built")
    theta = number(settings, "rope_theta")
    match settings.get("rope_type", settings.get("type", "default")):
        case "default":
            return RopeScaling(theta)
        case "linear":
            return RopeScaling(theta, "linear", factor=number(settings, "factor"))
        case "llama3":
            return RopeScaling(
                theta,
                "llama3",
                factor=number(settings, "factor"),
                low_freq_factor=number(settings, "low_freq_factor"),
                high_freq_factor=number(settings, "high_freq_factor"),
                original_context_length=size(settings, "original_max_position_embeddings"),
            )
        case other:
            raise ModelError(f"rope_type = {other!r}: not built; default, linear and llama3 are")


def from_gguf(
    fields: Mapping[str, Any], architecture: str, divisors: tuple[float, ...], head_dim: int
) -> RopeScaling:
    """`divisors` is the content of rope_freqs.weight, by which llama.cpp's converter says llama3."""
    theta = number(fields, f"{architecture}.rope.freq_base", 10000.0)
    kind_key, factor_key = f"{architecture}.rope.scaling.type", f"{architecture}.rope.scaling.factor"
    kind = fields.get(kind_key, "none")
    if kind == "none" and fields.get(f"{architecture}.rope.scale_linear") is not None:  # the key of older files
        kind, factor_key = "linear", f"{architecture}.rope.scale_linear"
    if kind not in ("none", "linear"):
        raise ModelError(f"{kind_key} = {kind!r}: not built; none and linear are")
    if kind == "linear" and divisors:
        raise ModelError(f"rope_freqs.weight together with {kind_key} = 'linear': not built")
    if divisors:
        if len(divisors) != head_dim // 2:
            raise ModelError(f"rope_freqs.weight has {len(divisors)} entries for heads of {head_dim}")
        return RopeScaling(theta, "divisors", divisors=divisors)
    return RopeScaling(theta, "linear", factor=number(fields, factor_key)) if kind == "linear" else RopeScaling(theta)
