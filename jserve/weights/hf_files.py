"""What lies beside the weights of an HF folder: config, tokenizer with its chat template, generation config.

From a GGUF they are made of its metadata; from a folder they are copied.  Read by transformers, vLLM and jserve alike.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import processors

from jserve.models.config import ModelConfig, RopeScaling
from jserve.tokenizer import Tokenizer, from_gguf
from jserve.weights.checkpoint import Checkpoint
from jserve.weights.errors import WeightsError
from jserve.weights.manifest import NAME as MANIFEST
from jserve.weights.safetensors import INDEX

CONFIG = "config.json"


def describing_files(checkpoint: Checkpoint, dtype: str) -> dict[str, bytes]:
    """{path within the folder: content}; `dtype` is what config.json says of the weights."""
    if isinstance(checkpoint.tokenizer_source, Path):
        return _copied(checkpoint, checkpoint.tokenizer_source, dtype)
    tokenizer = from_gguf(checkpoint.tokenizer_source)
    files = {
        CONFIG: _json(hf_config(checkpoint, dtype)),
        "generation_config.json": _json(_generation_config(checkpoint)),
        "tokenizer.json": _tokenizer_json(tokenizer).encode(),
        "tokenizer_config.json": _json(_tokenizer_config(checkpoint, tokenizer)),
    }
    tools = checkpoint.tokenizer_source.get("tokenizer.chat_template.tool_use")
    return files | ({"additional_chat_templates/tool_use.jinja": tools.encode()} if tools else {})


def _copied(checkpoint: Checkpoint, folder: Path, dtype: str) -> dict[str, bytes]:
    patterns = ("*.json", "*.jinja", "additional_chat_templates/*.jinja", "tokenizer.model")
    paths = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    files = {name: content for name, content in files.items() if name not in (INDEX, MANIFEST)}
    config = {key: value for key, value in json.loads(files[CONFIG]).items() if key != "dtype"}
    files[CONFIG] = _json({**config, "torch_dtype": dtype, "tie_word_embeddings": checkpoint.config.tied})
    return files


def hf_config(checkpoint: Checkpoint, dtype: str) -> dict[str, Any]:
    """config.json of a llama; WeightsError for what HF's llama cannot say."""
    config = checkpoint.config
    if config.qkv_bias != config.attention_out_bias:
        raise WeightsError(f"{checkpoint.path}: biases on q, k, v or on the output alone: no HF llama has that")
    window = config.sliding_window
    if window is not None and (config.qkv_bias or config.mlp_bias):
        raise WeightsError(f"{checkpoint.path}: biases and a sliding window of {window}: no HF architecture has both")
    stretch = config.rope.factor if config.rope.kind == "linear" else 1
    return {
        "architectures": ["LlamaForCausalLM" if window is None else "MistralForCausalLM"],
        "model_type": "llama" if window is None else "mistral",
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": int(config.context_length / stretch),
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_scaling(checkpoint.path, config),
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "torch_dtype": dtype,
        **({} if window is None else {"sliding_window": window}),
        **_ids(checkpoint),
    }


def _rope_scaling(path: Path, config: ModelConfig) -> dict[str, Any] | None:
    match config.rope.kind:
        case "default":
            return None
        case "linear":
            return {"rope_type": "linear", "factor": config.rope.factor}
        case "divisors":
            return _as_llama3(path, config.rope, config.head_dim)
    raise WeightsError(f"{path}: rope of kind {config.rope.kind} cannot be written to config.json")


def _as_llama3(path: Path, rope: RopeScaling, head_dim: int) -> dict[str, Any]:
    """The settings from which llama.cpp's converter made rope_freqs.weight: as Llama 3.1 and later ship them."""
    factor, low, high, original = max(rope.divisors), 1.0, 4.0, 8192
    turns = original / (2 * math.pi) * rope.theta ** -(np.arange(0, head_dim, 2) / head_dim)
    share = np.clip((turns - low) / (high - low), 0, 1)
    if not np.allclose(1 / ((1 - share) / factor + share), rope.divisors, rtol=1e-4):
        raise WeightsError(
            f"{path}: rope_freqs.weight does not follow from llama3's rule (factor {factor:g}, {original} tokens), "
            "and config.json cannot hold the frequencies themselves"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _generation_config(checkpoint: Checkpoint) -> dict[str, Any]:
    defaults = dict(checkpoint.generation_defaults)
    if "max_tokens" in defaults:
        defaults["max_new_tokens"] = defaults.pop("max_tokens")
    return {**_ids(checkpoint), **({"do_sample": True} if defaults.get("temperature") else {}), **defaults}


def _ids(checkpoint: Checkpoint) -> dict[str, Any]:
    """As published configs have them: one EOS as a number, several as a list."""
    eos = checkpoint.eos_token_ids
    ids = {
        "bos_token_id": checkpoint.config.bos_token_id,
        "eos_token_id": (eos[0] if len(eos) == 1 else list(eos)) if eos else None,
        "pad_token_id": _pad_token_id(checkpoint),
    }
    return {name: value for name, value in ids.items() if value is not None}


def _pad_token_id(checkpoint: Checkpoint) -> int | None:
    padding = checkpoint.tokenizer_source.get("tokenizer.ggml.padding_token_id")
    return padding if padding is not None else next(iter(checkpoint.eos_token_ids), None)


def _tokenizer_json(tokenizer: Tokenizer) -> str:
    """With a post-processor that adds what the GGUF says is added (BOS, mostly)."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    bare, around = (tokenizer.encode("a", add_special=add) for add in (False, True))
    if bare != around:
        at = next(at for at in range(len(around)) if around[at : at + len(bare)] == bare)
        special = {token_id: backend.id_to_token(token_id) for token_id in around[:at] + around[at + len(bare) :]}
        before = [special[token_id] for token_id in around[:at]]
        after = [special[token_id] for token_id in around[at + len(bare) :]]
        template = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B", *after],
            special_tokens=[(text, token_id) for token_id, text in special.items()],
        )
        existing = backend.post_processor
        backend.post_processor = template if existing is None else processors.Sequence([existing, template])
    return backend.to_str()


def _tokenizer_config(checkpoint: Checkpoint, tokenizer: Tokenizer) -> dict[str, Any]:
    fields = checkpoint.tokenizer_source
    tokens = fields["tokenizer.ggml.tokens"]
    ids = {
        "bos_token": checkpoint.config.bos_token_id,
        "eos_token": next(iter(checkpoint.eos_token_ids), None),
        "unk_token": fields.get("tokenizer.ggml.unknown_token_id"),
        "pad_token": _pad_token_id(checkpoint),
    }
    template = fields.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: tokens[token_id] for name, token_id in ids.items() if token_id is not None},
        "model_max_length": checkpoint.config.context_length,
        "add_bos_token": tokenizer.adds_bos,
        "clean_up_tokenization_spaces": False,
        **({} if template is None else {"chat_template": template}),
    }


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "surrogateescape")
