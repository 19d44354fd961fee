"""Keys of cached blocks: a SHA-256 chain whose every input is typed and length-prefixed.

A key covers the whole prefix: parent key, the block's tokens and, through the root, everything else that changes KV
or who may see it (model, dtype, quantisation, LoRA, images, salt). No two different field lists encode to the same
bytes. The index compares stored tokens as well, so even a colliding hash cannot give another prefix's KV.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

HashBlock = Callable[[bytes, bytes], bytes]
"""(parent key, the block's tokens as little-endian int32) -> key"""


def encode_fields(kind: str, **fields: bytes | str | int | None) -> bytes:
    """One unambiguous byte string of named values: name, type and length stand before each value."""
    parts = [_field(b"k", kind.encode())]
    for name, value in fields.items():
        parts.append(_field(b"n", name.encode()))
        match value:
            case None:
                parts.append(_field(b"-", b""))
            case bytes():
                parts.append(_field(b"b", value))
            case str():
                parts.append(_field(b"s", value.encode()))
            case int():
                parts.append(_field(b"i", str(value).encode()))
            case _:
                raise TypeError(f"field {name} of {kind} is {type(value).__name__}, expected bytes, str, int or None")
    return b"".join(parts)


def root_key(**fields: bytes | str | int | None) -> bytes:
    """Key of everything that all sequences of one engine share: model digest, dtype, quantisation, ..."""
    return hashlib.sha256(encode_fields("root", **fields)).digest()


def sequence_salt(**fields: bytes | str | int | None) -> bytes:
    """Salt of one sequence: tenant, the client's cache_salt, LoRA digest, hashes of images, ..."""
    return hashlib.sha256(encode_fields("sequence", **fields)).digest()


def chain_start(root: bytes, salt: bytes, block_size: int) -> bytes:
    """Parent key of a sequence's first block."""
    return hashlib.sha256(encode_fields("chain", root=root, salt=salt, block_size=block_size)).digest()


def hash_block(parent: bytes, tokens: bytes) -> bytes:
    """Key of a full block behind `parent`."""
    return hashlib.sha256(_BLOCK_TAG + len(parent).to_bytes(4, "little") + parent + tokens).digest()


@dataclass(frozen=True)
class KeyChain:
    """How the keys of a prefix's blocks follow from each other."""

    root: bytes
    block_size: int
    hash_block: HashBlock = hash_block

    def start(self, salt: bytes) -> bytes:
        return chain_start(self.root, salt, self.block_size)

    def step(self, parent: bytes, tokens: bytes) -> bytes:
        return self.hash_block(parent, tokens)


def _field(kind: bytes, value: bytes) -> bytes:
    return kind + len(value).to_bytes(8, "little") + value


_BLOCK_TAG = _field(b"k", b"block")
