"""One KV block in one file: what it is, its bytes, and a checksum over both.

    magic, 16 bytes | length of the label, u32 | label | length of the data, u64 | data | SHA-256 of all before

The label says all that the data depends on; a file is read only by who knows the label already.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

import numpy as np

MAGIC = b"jserve-kv-block1"
_DIGEST_BYTES = 32


class NotThisBlock(Exception):
    """The file is damaged, cut short, or holds something else."""


def size_of(label: bytes, num_bytes: int) -> int:
    """Bytes of the whole file."""
    return len(_head(label, num_bytes)) + num_bytes + _DIGEST_BYTES


def write(path: Path, label: bytes, data: np.ndarray) -> None:
    """Under another name first, so that a file of this name is whole or was damaged later.

    data: u8[n].
    """
    head = _head(label, len(data))
    digest = hashlib.sha256(head)
    digest.update(data)
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            file.write(head)
            file.write(data)
            file.write(digest.digest())
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def read(path: Path, label: bytes, data: np.ndarray) -> None:
    """Into `data` (u8[n]), which means nothing where this raises.

    Raises:
      NotThisBlock, OSError
    """
    head = _head(label, len(data))
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size != size_of(label, len(data)):
            raise NotThisBlock(f"{path.name} has not the size of this block")
        if file.read(len(head)) != head:
            raise NotThisBlock(f"{path.name} is another block")
        if file.readinto(data) != len(data):
            raise NotThisBlock(f"{path.name} is cut short")
        digest = hashlib.sha256(head)
        digest.update(data)
        if file.read(_DIGEST_BYTES) != digest.digest():
            raise NotThisBlock(f"{path.name} is damaged")


def _head(label: bytes, num_bytes: int) -> bytes:
    return MAGIC + struct.pack("<I", len(label)) + label + struct.pack("<Q", num_bytes)
