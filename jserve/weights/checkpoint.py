"""A checkpoint, opened but not loaded: what model it is, its tensors, its tokenizer, its sampling defaults, its digest.

One shape for both formats, cheap to make (headers only), so that `jserve plan` can look at a model too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jserve.models.config import ModelConfig, ModelError, from_gguf, from_hf
from jserve.models.fields import token_ids
from jserve.weights import gguf, manifest, safetensors
from jserve.weights.errors import WeightsError
from jserve.weights.tensor import StoredTensor

T = TypeVar("T")

_log = logging.getLogger(__name__)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    config: ModelConfig
    tensors: dict[str, StoredTensor]
    """By HF name."""
    tokenizer_source: Mapping[str, Any] | Path
    """GGUF metadata for `tokenizer.from_gguf`, or a folder for `tokenizer.from_folder`."""
    generation_defaults: dict[str, float | int]
    """Sampling values that the model's makers recommend, by SamplingParams' names; only those they set."""
    eos_token_ids: tuple[int, ...]
    digest: str
    """Hex SHA-256 that names the model's content; see `_digest` for what goes in."""
    arrays: Path | None = None
    """An Orbax checkpoint of the whole parameter tree, which then has no `tensors`."""


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a GGUF file, or a folder with config.json and safetensors or an Orbax checkpoint (`weights.convert`).

    WeightsError says what is wrong with it.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if path.is_file():
        return _open_gguf(path)
    raise WeightsError(f"{path}: no such file or folder")


def _open_gguf(path: Path) -> Checkpoint:
    file = gguf.read_gguf(path)
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    config = _named(path, from_gguf, file.fields, shapes, file.rope_divisors())
    tensors = gguf.as_hf(file, config.architecture, config.head_dim)
    return Checkpoint(
        path=path,
        config=config,
        tensors=tensors,
        tokenizer_source=file.fields,
        generation_defaults=_generation_defaults_from_gguf(file.fields),
        eos_token_ids=config.eos_token_ids,
        digest=_digest(np.fromfile(path, np.uint8, file.header_bytes).tobytes(), tensors),
    )


def _open_folder(folder: Path) -> Checkpoint:
    settings = _read_json(folder / "config.json")
    config = _named(folder / "config.json", from_hf, settings)
    converted = manifest.read(folder)
    if converted is not None:
        manifest.check_sizes(folder, converted)
    is_orbax = converted is not None and converted.format == manifest.ORBAX
    tensors = {} if is_orbax else safetensors.read_folder(folder)
    if config.tied and HEAD in tensors:
        config, tensors = _tied_with_head(folder, config, tensors)
    generation_file = folder / "generation_config.json"
    generation = _read_json(generation_file, missing={})
    return Checkpoint(
        path=folder,
        config=config,
        tensors=tensors,
        tokenizer_source=folder,
        generation_defaults=_generation_defaults_from_hf(generation),
        eos_token_ids=_named(generation_file, token_ids, generation, "eos_token_id") or config.eos_token_ids,
        digest=converted.digest if is_orbax else _digest(json.dumps(settings, sort_keys=True).encode(), tensors),
        arrays=folder / manifest.ORBAX_FOLDER if is_orbax else None,
    )


def _tied_with_head(
    folder: Path, config: ModelConfig, tensors: dict[str, StoredTensor]
) -> tuple[ModelConfig, dict[str, StoredTensor]]:
    """config.json says tied, yet a head is there.  As transformers does: a head of its own content is used."""
    head, embedding = tensors[HEAD], tensors.get(EMBEDDING)
    if embedding is not None and (head.shape, head.encoding) == (embedding.shape, embedding.encoding):
        if all(
            np.array_equal(head.read_raw(*rows), embedding.read_raw(*rows)) for rows in head.pieces(0, head.num_rows)
        ):
            return config, {name: tensor for name, tensor in tensors.items() if name != HEAD}
    _log.warning("%s: tie_word_embeddings is true, but %s differs from the embedding: it is used", folder, HEAD)
    return dataclasses.replace(config, tied=False), tensors


def _generation_defaults_from_hf(generation: Mapping[str, Any]) -> dict[str, float | int]:
    """The fields that vLLM takes from generation_config.json; do_sample is not among them."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    defaults = {name: generation[name] for name in names if generation.get(name) is not None}
    if generation.get("max_new_tokens") is not None:
        defaults["max_tokens"] = generation["max_new_tokens"]
    return defaults


def _generation_defaults_from_gguf(fields: Mapping[str, Any]) -> dict[str, float | int]:
    names = {
        "temp": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "min_p": "min_p",
        "penalty_repeat": "repetition_penalty",
    }
    keys = {f"general.sampling.{name}": ours for name, ours in names.items()}
    return {ours: fields[key] for key, ours in keys.items() if fields.get(key) is not None}


_SAMPLED_BYTES = 4096


def _digest(metadata: bytes, tensors: Mapping[str, StoredTensor]) -> str:
    """SHA-256 over the metadata and, of every tensor by name, its place in the format and its first and last 4 KiB.

    Reads about 8 KiB a tensor whatever the model's size.  Training moves every tensor as a whole, so two models differ
    in these samples; a file changed by hand in the middle of a tensor keeps its digest.
    """
    digest = hashlib.sha256(metadata)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.encoding} {tensor.shape} {tensor.num_bytes}\n".encode())
        count = min(_SAMPLED_BYTES, tensor.num_bytes)
        digest.update(tensor.read_bytes(0, count))
        digest.update(tensor.read_bytes(tensor.num_bytes - count, count))
    return digest.hexdigest()


def _read_json(path: Path, missing: dict | None = None) -> dict[str, Any]:
    if not path.is_file():
        if missing is not None:
            return missing
        raise WeightsError(f"{path}: missing; a model folder has config.json, a tokenizer and safetensors")
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise WeightsError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: not a JSON object")
    return value


def _named(path: Path, read: Callable[..., T], *args: Any) -> T:
    """`read(*args)`, with the file in front of what it complains about."""
    try:
        return read(*args)
    except ModelError as error:
        raise WeightsError(f"{path}: {error}") from None
