"""Writes tensors as sharded safetensors with an index, piece by piece: about a mebibyte of them is in memory at a time.

The layout is HF's: model.safetensors, or model-00001-of-00002.safetensors and model.safetensors.index.json.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from jserve.weights.manifest import FileDigest, write_synced
from jserve.weights.safetensors import INDEX, SINGLE
from jserve.weights.tensor import StoredTensor

DTYPES: Mapping[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_STORED_AS = {code: name for name, code in _CODES.items()}


def dtype_of(tensor: StoredTensor, wanted: str | None) -> str:
    """The number type to write: what is wanted, else its own; what only quantisations know becomes float32."""
    return wanted or _STORED_AS.get(tensor.encoding, "float32")


def size_of(tensor: StoredTensor, wanted: str | None) -> int:
    return math.prod(tensor.shape) * DTYPES[dtype_of(tensor, wanted)].itemsize


def write_tensors(
    folder: Path,
    tensors: Mapping[str, StoredTensor],
    wanted: str | None,
    shard_bytes: int,
    progress: Callable[[int, int], None],
) -> dict[str, FileDigest]:
    """Writes `tensors` into `folder`; returns the digests of the files.  `wanted` is as in `dtype_of`."""
    shards = _shards({name: size_of(tensor, wanted) for name, tensor in tensors.items()}, shard_bytes)
    total = sum(size_of(tensor, wanted) for tensor in tensors.values())
    names = [SINGLE] if len(shards) == 1 else [
        f"model-{index:05d}-of-{len(shards):05d}.safetensors" for index in range(1, len(shards) + 1)
    ]
    done, digests = 0, {}
    for file_name, members in zip(names, shards):
        writer = _Writer(folder / file_name)
        writer.write(_header({name: tensors[name] for name in members}, wanted))
        for name in members:
            tensor = tensors[name]
            for start, stop in tensor.pieces(0, tensor.num_rows):
                piece = tensor.read(start, stop).astype(DTYPES[dtype_of(tensor, wanted)], copy=False)
                done += writer.write(np.ascontiguousarray(piece).view(np.uint8).data)
                progress(done, total)
        digests[file_name] = writer.close()
    if len(shards) > 1:
        weight_map = {name: file_name for file_name, members in zip(names, shards) for name in members}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        digests[INDEX] = write_synced(folder / INDEX, (json.dumps(index, indent=1) + "\n").encode())
    return digests


class _Writer:
    """A file that is hashed while it is written."""

    def __init__(self, path: Path):
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self._num_bytes = 0

    def write(self, data: bytes | memoryview) -> int:
        count = memoryview(data).nbytes
        self._file.write(data)
        self._digest.update(data)
        self._num_bytes += count
        return count

    def close(self) -> FileDigest:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileDigest(self._num_bytes, self._digest.hexdigest())


def _shards(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """Names in order, cut where a shard would grow beyond `shard_bytes`; a tensor larger than that has its own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _header(tensors: Mapping[str, StoredTensor], wanted: str | None) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + size_of(tensor, wanted)
        code = _CODES[dtype_of(tensor, wanted)]
        entries[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
