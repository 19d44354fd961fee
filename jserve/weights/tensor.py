"""One tensor as a checkpoint file stores it, read in pieces: the whole tensor never needs to be in memory twice.

Knows no file format: a format says where the bytes lie and how to decode them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jserve.weights.errors import WeightsError

CHUNK_BYTES = 1 << 19
"""Stored bytes decoded at a time.  Small enough to stay in cache between decoding and placing."""


@dataclass(frozen=True)
class StoredTensor:
    name: str
    """As the file spells it."""
    shape: tuple[int, ...]
    """Slowest axis first; axis 0 is what is read in pieces."""
    encoding: str
    """The format's name of the number type, e.g. BF16 or Q4_1."""
    file: Path
    offset: int
    num_bytes: int
    decode: Callable[[np.ndarray, tuple[int, ...]], np.ndarray]
    """(u8[n] of whole rows, the shape they have) -> numbers of that shape, possibly a view of the bytes."""
    row_granularity: int = 1
    """Rows are read in multiples of this (a head, where its rows are stored in another order)."""
    reorder: Callable[[np.ndarray], np.ndarray] = lambda rows: rows
    """Rows [n, ...] as stored -> in the order that is wanted."""

    @property
    def num_rows(self) -> int:
        return self.shape[0]

    def check_within(self, file_bytes: int) -> None:
        if self.offset + self.num_bytes > file_bytes:
            raise WeightsError(
                f"{self.file}: truncated: tensor {self.name} is bytes {self.offset} to {self.offset + self.num_bytes}, "
                f"the file has {file_bytes}"
            )

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows start:stop as numbers.  Both are multiples of row_granularity."""
        return self.reorder(self.decode(self.read_raw(start, stop), (stop - start, *self.shape[1:])))

    def read_packed(self, start: int, stop: int) -> np.ndarray:
        """The same rows as u8[rows, bytes], not decoded."""
        return self.reorder(self.read_raw(start, stop).reshape(stop - start, -1))

    def read_raw(self, start: int, stop: int) -> np.ndarray:
        """The stored bytes of rows start:stop."""
        row_bytes = self.num_bytes // self.num_rows
        return self.read_bytes(start * row_bytes, (stop - start) * row_bytes)

    def read_bytes(self, start: int, count: int) -> np.ndarray:
        data = np.fromfile(self.file, np.uint8, count, offset=self.offset + start)
        if data.size < count:
            raise WeightsError(
                f"{self.file}: truncated: tensor {self.name} needs bytes up to {self.offset + start + count}, "
                f"the file ends at {self.offset + start + data.size}"
            )
        return data

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Cuts rows start:stop into ranges of about CHUNK_BYTES."""
        row_bytes = max(1, self.num_bytes // self.num_rows)
        step = max(1, CHUNK_BYTES // row_bytes // self.row_granularity) * self.row_granularity
        for first in range(start, stop, step):
            yield first, min(first + step, stop)
