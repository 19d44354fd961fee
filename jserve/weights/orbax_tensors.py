"""The tensors of an Orbax checkpoint under HF's names, read in rows: what conversion from one needs.

A tensor is part of a stacked, joined parameter (q of `layers.qkv`, say); a read takes only the chunks that it lies in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jserve.models.spec import ParamSpec, Piece, checkpoint_tensors
from jserve.weights.errors import WeightsError
from jserve.weights.tensor import CHUNK_BYTES

_ENCODINGS = {"float32": "F32", "bfloat16": "BF16"}


@dataclass(frozen=True)
class OrbaxTensor:
    """Reads like a StoredTensor."""

    name: str
    spec: ParamSpec
    piece: Piece
    layer: int
    array: Any
    """The parameter, a tensorstore array."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.checkpoint_shape(self.piece)

    @property
    def encoding(self) -> str:
        return _ENCODINGS[str(self.spec.dtype)]

    @property
    def num_rows(self) -> int:
        return self.shape[0]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.spec.dtype.itemsize

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows start:stop, which lie together in one unit or are whole units."""
        rows = self.spec.rows(self.piece)
        runs, at = [], start
        while at < stop:
            unit, first = divmod(at, rows)
            count = min(rows - first, stop - at)
            begin = unit * (self.spec.num_rows // self.piece.units) + self.piece.start + first
            array = self.array[self.layer] if self.spec.stacked else self.array
            runs.append(array[begin : begin + count].read())
            at += count
        return np.concatenate([run.result() for run in runs])

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Cuts rows start:stop into ranges of about CHUNK_BYTES."""
        step = max(1, CHUNK_BYTES // max(1, self.num_bytes // self.num_rows))
        for first in range(start, stop, step):
            yield first, min(first + step, stop)


def open_tensors(folder: Path, named: dict[str, ParamSpec]) -> dict[str, OrbaxTensor]:
    """By HF name.  `named` are the parameters' specs, in the dtype that they are stored in, by their Orbax names."""
    import tensorstore

    tensors = {}
    for parameter, spec in named.items():
        where = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{(folder / parameter).absolute()}/"}}
        try:
            array = tensorstore.open(where, read=True).result()
        except ValueError as error:
            raise WeightsError(f"{folder / parameter}: cannot be read: {str(error).splitlines()[0]}") from None
        if tuple(array.shape) != spec.shape or array.dtype.name != str(spec.dtype):
            raise WeightsError(
                f"{folder / parameter}: {array.dtype.name}{list(array.shape)}, the config makes it "
                f"{spec.dtype}{list(spec.shape)}"
            )
        for name, piece, layer in checkpoint_tensors(spec):
            tensors[name] = OrbaxTensor(name, spec, piece, layer, array)
    return tensors
