"""Fills a model's spec tree from a checkpoint: each parameter exactly once, tensor by tensor, straight into its place.

Host memory holds the parameters (on an accelerator: the largest one at a time) and about a mebibyte of the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jserve.models.config import ModelConfig, ModelError
from jserve.models.quantized import QuantizedMatrix, quantize_rows
from jserve.models.registry import model_code
from jserve.models.spec import ParamSpec, checkpoint_tensors, leaves, num_bytes
from jserve.weights.checkpoint import HEAD, Checkpoint, open_checkpoint
from jserve.weights.errors import WeightsError
from jserve.weights.tensor import StoredTensor

Place = Callable[[np.ndarray, ParamSpec], jax.Array]
"""Puts one filled host array where the model wants it."""
Progress = Callable[[int, int], None]
"""(bytes of parameters that are in place, bytes of all parameters)"""

_ALIGNMENT = 64
"""XLA's CPU client takes a host array as it is, without a copy, where it starts at a multiple of this."""


@dataclass(frozen=True)
class LoadedModel:
    config: ModelConfig
    params: Any
    """The family's parameter tree."""
    tokenizer_source: Mapping[str, Any] | Path
    generation_defaults: dict[str, float | int]
    eos_token_ids: tuple[int, ...]
    digest: str


def load_model(
    path: str | Path,
    dtype: np.dtype | str,
    *,
    quantize: str | None = None,
    context_length: int | None = None,
    device: jax.Device | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """The model at `path` (a GGUF file, or a folder with safetensors or an Orbax checkpoint) with weights in `dtype`.

    `quantize` "int8" keeps the matrices as QuantizedMatrix, made row by row while they are read.
    `device` None is jax's default device.  Raises ModelError (WeightsError where the files are at fault).
    """
    checkpoint = open_checkpoint(path)
    try:
        config = checkpoint.config.with_context_length(context_length)
        specs = model_code(config).param_specs(config, dtype, quantize=quantize)
    except ModelError as error:
        raise WeightsError(f"{path}: {error}") from None
    device = device or jax.devices()[0]

    def place(array: np.ndarray, spec: ParamSpec) -> jax.Array:
        return _put(array, device)

    if checkpoint.arrays is None:
        params = load_params(specs, checkpoint, place, progress)
    else:
        from jserve.weights.orbax_params import restore_params  # Orbax takes seconds to import

        params = restore_params(checkpoint.arrays, specs, place, device, progress)
    return LoadedModel(
        config=config,
        params=params,
        tokenizer_source=checkpoint.tokenizer_source,
        generation_defaults=checkpoint.generation_defaults,
        eos_token_ids=checkpoint.eos_token_ids,
        digest=checkpoint.digest,
    )


def load_params(specs: Any, checkpoint: Checkpoint, place: Place, progress: Progress | None = None) -> Any:
    """The spec tree with arrays for specs."""
    check_one_to_one(specs, checkpoint)
    total = num_bytes(specs)
    done = 0

    def load(spec: ParamSpec) -> jax.Array | QuantizedMatrix:
        nonlocal done
        array = aligned_empty(spec.shape, np.int8 if spec.quantized else spec.dtype)
        scales = aligned_empty(spec.shape[:-1], np.float32) if spec.quantized else None
        for name, piece, layer in checkpoint_tensors(spec):
            view = spec.view(array, piece, layer)
            fill(view, checkpoint.tensors[name], None if scales is None else spec.view(scales, piece, layer))
        done += spec.num_bytes
        if progress is not None:
            progress(done, total)
        return place(array, spec) if scales is None else QuantizedMatrix(place(array, spec), place(scales, spec))

    return jax.tree.map(load, specs)


def check_one_to_one(specs: Any, checkpoint: Checkpoint) -> None:
    """Before anything is read: every parameter has its tensors, of the right shape, and every tensor its parameter."""
    tensors = checkpoint.tensors
    wanted = {
        name: spec.checkpoint_shape(piece) for spec in leaves(specs) for name, piece, _ in checkpoint_tensors(spec)
    }
    missing = [name for name in wanted if name not in tensors]
    if missing:
        hint = ", and the config does not say that it is tied to the embedding" if missing == [HEAD] else ""
        raise WeightsError(f"{checkpoint.path}: missing {_some(missing)}{hint}")
    for name, shape in wanted.items():
        tensor = tensors[name]
        if tensor.shape != shape:
            raise WeightsError(
                f"{tensor.file}: tensor {tensor.name} is {list(tensor.shape)}, the config makes it {list(shape)}"
            )
    # Not a warning: a bias or a norm that the config does not know would silently be left out of the model.
    unknown = [tensor.name for name, tensor in tensors.items() if name not in wanted and not _is_derived(name)]
    if unknown:
        raise WeightsError(f"{checkpoint.path}: no parameter takes {_some(unknown)}")


def _is_derived(name: str) -> bool:
    """Older checkpoints carry the rope frequencies, which follow from the config."""
    return name.endswith("rotary_emb.inv_freq")


def fill(target: np.ndarray, tensor: StoredTensor, scales: np.ndarray | None) -> None:
    """Reads `tensor` in pieces into the view [units, rows, ...], converting to its dtype; where there are `scales`
    [units, rows], quantized."""
    rows_per_unit = target.shape[1]
    for unit in range(target.shape[0]):
        first = unit * rows_per_unit
        for start, stop in tensor.pieces(first, first + rows_per_unit):
            rows = slice(start - first, stop - first)
            if scales is None:
                target[unit, rows] = tensor.read(start, stop)
            else:
                quantize_rows(tensor.read(start, stop), target[unit, rows], scales[unit, rows])


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    buffer = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + num_bytes].view(dtype).reshape(shape)


def _put(array: np.ndarray, device: jax.Device) -> jax.Array:
    """On CPU the array itself becomes the jax array.  Elsewhere the copy is awaited: one array at a time."""
    placed = jax.device_put(array, device, may_alias=True)
    return placed if device.platform == "cpu" else jax.block_until_ready(placed)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more tensors" if len(names) > 3 else "")
