"""What a model is, as far as memory and time depend on it: from a name, a config.json, or a checkpoint on disk.

Reads more architectures than are served: a prediction needs sizes, not code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jserve.config import ConfigError


@dataclass(frozen=True)
class LayerGroup:
    """Layers that need the same cache."""

    num_layers: int
    window: int | None = None


@dataclass(frozen=True)
class ModelShape:
    name: str
    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    vocab_size: int
    context_length: int
    tied: bool = False
    groups: tuple[LayerGroup, ...] = ()
    num_norms: int = 2
    """Norms of d_model a layer."""
    qk_norm: bool = False
    qkv_bias: bool = False

    def __post_init__(self):
        if not self.groups:
            object.__setattr__(self, "groups", (LayerGroup(self.num_layers),))

    @property
    def matrix_parameters(self) -> int:
        """Parameters that multiply every token, all layers, the head left out."""
        attention = self.d_model * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.d_model * self.d_ff)

    @property
    def num_parameters(self) -> int:
        small = self.num_norms * self.d_model + 2 * self.head_dim * self.qk_norm
        small += self.qkv_bias * self.head_dim * (self.num_heads + 2 * self.num_kv_heads)
        embeddings = self.vocab_size * self.d_model * (1 if self.tied else 2)
        return self.matrix_parameters + self.num_layers * small + embeddings + self.d_model


def _llama(name, num_layers, d_model, heads, kv_heads, head_dim, d_ff, context, vocab=128256, tied=False, **more):
    return ModelShape(name, num_layers, d_model, heads, kv_heads, head_dim, d_ff, vocab, context, tied, **more)


def _qwen(name, num_layers, d_model, heads, d_ff, tied=False):
    return _llama(name, num_layers, d_model, heads, 8, 128, d_ff, 40960, 151936, tied, qk_norm=True)


def _gemma(name, num_layers, d_model, heads, kv_heads, head_dim, d_ff, context, window, vocab=262208):
    num_global = num_layers // 6  # every sixth layer attends to everything
    groups = (LayerGroup(num_global), LayerGroup(num_layers - num_global, window))
    return _llama(
        name, num_layers, d_model, heads, kv_heads, head_dim, d_ff, context, vocab, True,
        groups=groups, num_norms=4, qk_norm=True,
    )


BUILT_IN = {
    shape.name: shape
    for shape in (
        _llama("smollm2-135m", 30, 576, 9, 3, 64, 1536, 8192, 49152, True),
        _llama("llama-3-8b", 32, 4096, 32, 8, 128, 14336, 8192),
        _llama("llama-3-70b", 80, 8192, 64, 8, 128, 28672, 8192),
        _llama("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 131072),
        _llama("llama-3.1-70b", 80, 8192, 64, 8, 128, 28672, 131072),
        _llama("llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 131072, tied=True),
        _llama("llama-3.2-3b", 28, 3072, 24, 8, 128, 8192, 131072, tied=True),
        _llama("mistral-7b", 32, 4096, 32, 8, 128, 14336, 32768, 32768),
        _qwen("qwen3-0.6b", 28, 1024, 16, 3072, True),
        _qwen("qwen3-1.7b", 28, 2048, 16, 6144, True),
        _qwen("qwen3-4b", 36, 2560, 32, 9728, True),
        _qwen("qwen3-8b", 36, 4096, 32, 12288),
        _qwen("qwen3-14b", 40, 5120, 40, 17408),
        _qwen("qwen3-32b", 64, 5120, 64, 25600),
        _gemma("gemma-3-1b", 26, 1152, 4, 1, 256, 6912, 32768, 512, 262144),
        _gemma("gemma-3-4b", 34, 2560, 8, 4, 256, 10240, 131072, 1024),
        _gemma("gemma-3-12b", 48, 3840, 16, 8, 256, 15360, 131072, 1024),
        _gemma("gemma-3-27b", 62, 5376, 32, 16, 128, 21504, 131072, 1024),
    )
}


def find_model(name: str) -> ModelShape:
    """A built-in name, a config.json, a folder with one, or a GGUF file.  ConfigError says what would do."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ConfigError(f"--model {name}: neither a file nor a built-in shape; built in: {', '.join(BUILT_IN)}")
    if path.suffix == ".gguf":
        return _from_gguf(path)
    try:
        settings = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: expected an object, as Hugging Face's config.json")
    return from_hf(settings, path.parent.name if path.name == "config.json" else path.stem)


def from_hf(settings: Mapping[str, Any], name: str) -> ModelShape:
    """The sizes in a Hugging Face config; ConfigError names the key that is missing or not understood."""
    settings = {**settings, **(settings.get("text_config") or {})}  # multimodal: the language model
    if settings.get("num_local_experts") or settings.get("num_experts"):
        raise ConfigError(f"{name}: models with experts are not built")
    if "kv_lora_rank" in settings:
        raise ConfigError(f"{name}: latent attention (kv_lora_rank) is not built")

    def size(key: str, default: int | None = None) -> int:
        value = settings.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name}: {key} = {value!r}: expected a whole number of at least 1")
        return value

    num_layers, d_model, num_heads = size("num_hidden_layers"), size("hidden_size"), size("num_attention_heads")
    kind = str(settings.get("model_type", ""))
    return ModelShape(
        name=name,
        num_layers=num_layers,
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=size("num_key_value_heads", num_heads),
        head_dim=size("head_dim", max(1, d_model // num_heads)),
        d_ff=size("intermediate_size"),
        vocab_size=size("vocab_size"),
        context_length=size("max_position_embeddings", 131072 if kind.startswith("gemma3") else 8192),
        tied=bool(settings.get("tie_word_embeddings", kind.startswith("gemma"))),
        groups=_groups(settings, kind, num_layers),
        num_norms=4 if kind.startswith(("gemma2", "gemma3")) else 2,
        qk_norm=kind.startswith(("qwen3", "gemma3")),
        qkv_bias=bool(settings.get("attention_bias", kind == "qwen2")),
    )


def _groups(settings: Mapping[str, Any], kind: str, num_layers: int) -> tuple[LayerGroup, ...]:
    window = settings.get("sliding_window")
    if not isinstance(window, int) or settings.get("use_sliding_window") is False:
        return (LayerGroup(num_layers),)
    if isinstance(types := settings.get("layer_types"), list):
        num_global = sum(one == "full_attention" for one in types)
    elif kind.startswith("gemma"):
        num_global = num_layers // (settings.get("sliding_window_pattern") or (2 if kind == "gemma2" else 6))
    else:
        num_global = 0
    groups = (LayerGroup(num_global), LayerGroup(num_layers - num_global, window))
    return tuple(group for group in groups if group.num_layers)


def _from_gguf(path: Path) -> ModelShape:
    from jserve.models.config import from_gguf
    from jserve.weights.gguf import read_gguf

    file = read_gguf(path)
    model = from_gguf(file.fields, {name: tensor.shape for name, tensor in file.tensors.items()})
    return ModelShape(
        path.stem, model.num_layers, model.d_model, model.num_heads, model.num_kv_heads, model.head_dim, model.d_ff,
        model.vocab_size, model.context_length, model.tied, qkv_bias=model.qkv_bias,
        groups=tuple(LayerGroup(group.num_layers, group.sliding_window) for group in model.layer_groups),
    )
