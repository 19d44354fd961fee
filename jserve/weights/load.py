"""Fills a model's spec tree from a checkpoint: each parameter exactly once, tensor by tensor, straight into its place.

Host memory holds the parameters (on an accelerator: one layer of one, or the embedding) and about a mebibyte of the
checkpoint.  Every tensor is read once, and each device gets its part of a parameter only.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jserve.models.config import ModelConfig, ModelError
from jserve.models.packed import PackedMatrix, can_pack, packed_row_bytes, packed_shape
from jserve.models.quantized import QuantizedMatrix, quantize_rows
from jserve.models.registry import model_code
from jserve.models.spec import ParamSpec, Piece, checkpoint_tensors, leaves, num_bytes
from jserve.parallel.placement import Placement, on_devices
from jserve.weights.checkpoint import HEAD, Checkpoint, open_checkpoint
from jserve.weights.errors import WeightsError
from jserve.weights.tensor import StoredTensor
from pallas_kernels.cpu.ops import why_no_tiles
from pallas_kernels.cpu.packed_layout import tiled

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
    path: str | Path | Checkpoint,
    dtype: np.dtype | str,
    *,
    quantize: str | None = None,
    context_length: int | None = None,
    placement: Placement | None = None,
    progress: Progress | None = None,
    keep_packed: bool = False,
) -> LoadedModel:
    """The model at `path` (a GGUF file, or a folder with safetensors or an Orbax checkpoint) with weights in `dtype`.

    `quantize` "int8" keeps the matrices as QuantizedMatrix, made row by row while they are read.
    `keep_packed` keeps a GGUF file's matrices in its own 4 or 8 bits where the CPU's matmul expands them to the same float32
    numbers as it reads them.  `placement` None is jax's default device.  Raises ModelError (WeightsError where the files are at fault).
    """
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    placement = placement or on_devices(jax.devices()[:1])
    try:
        config = checkpoint.config.with_context_length(context_length)
        param_specs = functools.partial(model_code(config).param_specs, config, dtype, quantize=quantize)
        specs = param_specs(num_shards=placement.num_shards)
    except ModelError as error:
        raise WeightsError(f"{checkpoint.path}: {error}") from None
    if keep_packed and packs(checkpoint, placement, dtype, quantize):
        specs = with_packed(specs, checkpoint)
    if checkpoint.arrays is None:
        params = load_params(specs, checkpoint, placement, progress)
    else:
        from jserve.weights.orbax_params import restore_params  # Orbax takes seconds to import

        params = restore_params(checkpoint.arrays, param_specs(), specs, placement, progress)
    return LoadedModel(
        config=config,
        params=params,
        tokenizer_source=checkpoint.tokenizer_source,
        generation_defaults=checkpoint.generation_defaults,
        eos_token_ids=checkpoint.eos_token_ids,
        digest=checkpoint.digest,
    )


def packs(checkpoint: Checkpoint, placement: Placement, dtype: np.dtype | str, quantize: str | None) -> bool:
    """Whether matrices may stay packed: tensors of a file, float32 on one CPU that has the kernel."""
    if checkpoint.arrays is not None:
        return False
    is_one_cpu = placement.num_shards == 1 and placement.devices[0].platform == "cpu"
    return is_one_cpu and np.dtype(dtype) == np.float32 and quantize is None and why_no_tiles() is None


def with_packed(specs: Any, checkpoint: Checkpoint) -> Any:
    """`specs` with every matrix packed whose tensors all have one encoding that the kernel reads."""

    def packed(spec: ParamSpec) -> ParamSpec:
        found = {checkpoint.tensors[name].encoding for name, _, _ in checkpoint_tensors(spec) if name in checkpoint.tensors}
        can = len(found) == 1 and can_pack(*found, spec.layer_shape)
        return dataclasses.replace(spec, packed=found.pop()) if can else spec

    return jax.tree.map(packed, specs)


def load_params(specs: Any, checkpoint: Checkpoint, placement: Placement, progress: Progress | None = None) -> Any:
    """The spec tree with arrays for specs."""
    check_one_to_one(specs, checkpoint)
    total = num_bytes(specs)
    done = 0

    def load(spec: ParamSpec) -> jax.Array | QuantizedMatrix | PackedMatrix:
        nonlocal done
        placed = (_load_by_layer if spec.stacked and placement.copies else _load_whole)(spec, checkpoint, placement)
        done += spec.num_bytes
        if progress is not None:
            progress(done, total)
        if spec.packed is not None:
            return PackedMatrix(placed[0], spec.packed)
        return QuantizedMatrix(*placed) if spec.quantized else placed[0]

    return jax.tree.map(load, specs)


def _load_whole(spec: ParamSpec, checkpoint: Checkpoint, placement: Placement) -> list[jax.Array]:
    arrays = [aligned_empty(shape, dtype) for shape, dtype, _ in _arrays(spec)]
    for name, piece, layer in checkpoint_tensors(spec):
        _read(spec, piece, layer, checkpoint.tensors[name], arrays)
    if spec.packed is not None:
        arrays = [_in_tiles(arrays[0], spec)]
    return [placement.put(array, axes) for array, (_, _, axes) in zip(arrays, _arrays(spec))]


def _load_by_layer(spec: ParamSpec, checkpoint: Checkpoint, placement: Placement) -> list[jax.Array]:
    """One layer after another through the same host memory, so that a model may be larger than that."""
    assert spec.packed is None, f"{spec}: packed matrices are of the CPU, whose memory is the host's"
    arrays = [aligned_empty((1, *shape[1:]), dtype) for shape, dtype, _ in _arrays(spec)]
    placed = [placement.empty(shape, dtype, axes) for shape, dtype, axes in _arrays(spec)]
    for layer, found in itertools.groupby(checkpoint_tensors(spec), key=lambda one: one[2]):
        for name, piece, _ in found:
            _read(spec, piece, 0, checkpoint.tensors[name], arrays)
        placed = [
            placement.with_layer(whole, layer, array[0], axes)
            for whole, array, (_, _, axes) in zip(placed, arrays, _arrays(spec))
        ]
    return placed


def _in_tiles(rows: np.ndarray, spec: ParamSpec) -> np.ndarray:
    """The same memory in the kernel's order, a layer at a time."""
    result = rows.reshape(packed_shape(spec.shape, spec.packed))
    for before, after in zip(rows, result) if spec.stacked else [(rows, result)]:
        after[...] = tiled(before, spec.packed)
    return result


def _arrays(spec: ParamSpec) -> list[tuple[tuple[int, ...], np.dtype, tuple[str, ...]]]:
    """(shape, dtype, logical axes) of what a parameter consists of: itself, or values and scales."""
    if spec.packed is not None:
        row_bytes = packed_row_bytes(spec.shape[-1], spec.packed)
        return [((*spec.shape[:-1], row_bytes), np.dtype(np.uint8), spec.logical_axes)]
    if not spec.quantized:
        return [(spec.shape, spec.dtype, spec.logical_axes)]
    return [(spec.shape, np.dtype(np.int8), spec.logical_axes),
            (spec.shape[:-1], np.dtype(np.float32), spec.logical_axes[:-1])]


def _read(spec: ParamSpec, piece: Piece, layer: int, tensor: StoredTensor, arrays: Sequence[np.ndarray]) -> None:
    """Fills the piece's place in `arrays`, and its copies'."""
    copies = [[spec.view(array, piece, layer, copy) for array in arrays] for copy in range(piece.copies)]
    values, *scales = copies[0]
    fill(values, tensor, scales[0] if scales else None, is_packed=spec.packed is not None)
    for targets in copies[1:]:
        for target, source in zip(targets, copies[0]):
            target[...] = source


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


def fill(target: np.ndarray, tensor: StoredTensor, scales: np.ndarray | None, is_packed: bool = False) -> None:
    """Reads `tensor` in pieces into the view [units, rows, ...], converting to its dtype; where there are `scales`
    [units, rows], quantized; or as it is stored, `is_packed`."""
    read = tensor.read_packed if is_packed else tensor.read
    rows_per_unit = target.shape[1]
    for unit in range(target.shape[0]):
        first = unit * rows_per_unit
        for start, stop in tensor.pieces(first, first + rows_per_unit):
            rows = slice(start - first, stop - first)
            if scales is None:
                target[unit, rows] = read(start, stop)
            else:
                quantize_rows(tensor.read(start, stop), target[unit, rows], scales[unit, rows])


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    buffer = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + num_bytes].view(dtype).reshape(shape)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more tensors" if len(names) > 3 else "")
