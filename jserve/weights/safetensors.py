"""HF safetensors: which file holds which tensor, and where in it.

Reads headers only; the tensors' bytes are read when they are placed.  Files are read, not mapped: a map past the end of
a truncated file kills the process.
"""

from __future__ import annotations

import json
import logging
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import ml_dtypes
import numpy as np

from jserve.weights.errors import WeightsError
from jserve.weights.tensor import StoredTensor

_log = logging.getLogger(__name__)

_DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "F64": np.dtype(np.float64),
        "F32": np.dtype(np.float32),
        "F16": np.dtype(np.float16),
        "BF16": np.dtype(ml_dtypes.bfloat16),
    }
)
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in `folder`, by name: of model.safetensors, or as the index says."""
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    if (folder / INDEX).is_file():
        return _read_sharded(folder, folder / INDEX)
    others = sorted(path.name for path in folder.glob("*.safetensors")) or sorted(
        path.name for path in folder.glob("*.bin")
    )
    found = f"; it holds {', '.join(others[:4])}" if others else ""
    raise WeightsError(f"{folder}: neither {SINGLE} nor {INDEX} is there{found}")


def _read_sharded(folder: Path, index: Path) -> dict[str, StoredTensor]:
    """The index decides which shard holds a tensor: the same name elsewhere is a leftover and is ignored, aloud."""
    shard_of = _weight_map(index)
    shards = {}
    for shard in sorted(set(shard_of.values())):
        path = folder / shard
        if not path.is_file():
            names = [name for name, at in shard_of.items() if at == shard]
            raise WeightsError(f"{path}: the shard is missing; {index.name} says it holds {_some(names)}")
        shards[shard] = read_header(path)
    for name, shard in shard_of.items():
        if name not in shards[shard]:
            raise WeightsError(f"{folder / shard}: tensor {name} is missing; {index.name} says it is there")
    for shard, tensors in shards.items():
        extras = [name for name in tensors if shard_of.get(name) != shard]
        if extras:
            _log.warning("%s: ignored, for %s does not place them here: %s", folder / shard, index.name, _some(extras))
    return {name: shards[shard][name] for name, shard in shard_of.items()}


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        shards = set(weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index}: no readable weight_map ({error!r})") from None
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise WeightsError(f"{index}: {shard!r} is not the name of a file beside it")
    return weight_map


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file; every one lies within the file, or WeightsError."""
    file_bytes = path.stat().st_size
    if file_bytes < 8:
        raise WeightsError(f"{path}: truncated: {file_bytes} bytes, a safetensors file starts with 8 of header length")
    with path.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        if 8 + header_bytes > file_bytes:
            raise WeightsError(f"{path}: the header is {header_bytes} bytes long, the file has only {file_bytes}")
        try:
            header = json.loads(file.read(header_bytes))
            header.pop("__metadata__", None)
            tensors = {
                name: _stored(path, name, entry, data_start=8 + header_bytes) for name, entry in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, WeightsError):
                raise
            raise WeightsError(f"{path}: the header is not a safetensors header ({error!r})") from None
    for tensor in tensors.values():
        tensor.check_within(file_bytes)
    return tensors


def _stored(path: Path, name: str, entry: dict, data_start: int) -> StoredTensor:
    encoding, shape = entry["dtype"], tuple(entry["shape"])
    start, end = entry["data_offsets"]
    dtype = _DTYPES.get(encoding)

    def decode(data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        if dtype is None:
            raise WeightsError(f"{path}: tensor {name} is {encoding}: not built; {', '.join(_DTYPES)} are")
        return data.view(dtype).reshape(shape)

    if not 0 <= start <= end:
        raise WeightsError(f"{path}: tensor {name}: data_offsets {start} to {end} are no range")
    if dtype is not None and end - start != math.prod(shape) * dtype.itemsize:
        raise WeightsError(
            f"{path}: tensor {name}: {encoding}{list(shape)} needs {math.prod(shape) * dtype.itemsize} bytes, "
            f"the header gives it {end - start}"
        )
    return StoredTensor(name, shape, encoding, path, data_start + start, end - start, decode)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
