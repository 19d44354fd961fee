"""GGUF: metadata as plain Python values, tensors under HF's names with llama.cpp's changes undone.

The header is parsed here because the `gguf` package's reader makes numpy views of every vocabulary entry (2.6 s for
49,152 tokens, 0.1 s here).
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from jserve.weights.errors import WeightsError
from jserve.weights.gguf_decode import decoder
from jserve.weights.tensor import StoredTensor

ROPE_DIVISORS = "rope_freqs.weight"
_SCALARS = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufFile:
    path: Path
    fields: dict[str, Any]
    """Metadata: numbers, strings, and lists of them."""
    tensors: dict[str, StoredTensor]
    """By GGUF name."""
    header_bytes: int
    """Bytes before the first tensor."""

    def rope_divisors(self) -> tuple[float, ...]:
        tensor = self.tensors.get(ROPE_DIVISORS)
        return () if tensor is None else tuple(tensor.read(0, tensor.num_rows).astype(np.float32).tolist())


def read_gguf(path: Path) -> GgufFile:
    """Parses the header and checks that every tensor lies within the file."""
    file_bytes = path.stat().st_size
    if file_bytes < 24:
        raise WeightsError(f"{path}: truncated: {file_bytes} bytes, a GGUF header has at least 24")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise WeightsError(f"{path}: not a GGUF file: it starts with {data[:4]!r}")
        cursor = _Cursor(data, 4, path)
        version = cursor.number("I")
        if version not in (2, 3):
            raise WeightsError(f"{path}: GGUF version {version}: not built; little-endian 2 and 3 are")
        num_tensors, num_fields = cursor.number("Q"), cursor.number("Q")
        fields = {}
        for _ in range(num_fields):
            key = cursor.name()
            fields[key] = cursor.value(cursor.number("I"))
        infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise WeightsError(f"{path}: general.alignment = {alignment!r}: must be at least 1")
    data_start = -(-cursor.offset // alignment) * alignment
    if fields.get("split.count", 1) > 1:
        raise WeightsError(f"{path}: one of {fields['split.count']} splits: not built; merge them into one file first")
    tensors = {name: _stored(path, name, shape, kind, data_start + at) for name, shape, kind, at in infos}
    for tensor in tensors.values():
        tensor.check_within(file_bytes)
    return GgufFile(path, fields, tensors, data_start)


class _Cursor:
    """Reads little-endian values from `data`, one after the other; running past the end is a WeightsError."""

    def __init__(self, data: mmap.mmap, offset: int, path: Path):
        self.data, self.offset, self.path = data, offset, path

    def take(self, count: int) -> bytes:
        start, self.offset = self.offset, self.offset + count
        if self.offset > len(self.data):
            raise WeightsError(
                f"{self.path}: truncated: the header needs bytes up to {self.offset}, the file has {len(self.data)}"
            )
        return self.data[start : self.offset]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def name(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "backslashreplace")

    def string(self) -> str:
        # Lossless: a vocabulary may hold bytes that are not UTF-8.
        return self.take(self.number("Q")).decode("utf-8", "surrogateescape")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise WeightsError(f"{self.path}: byte {self.offset}: {kind} is no GGUF value type")
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        if kind not in _SCALARS:
            raise WeightsError(f"{self.path}: byte {self.offset}: arrays of GGUF value type {kind} are not built")
        dtype = np.dtype("<" + _SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape with the slowest axis first, number type, offset within the data)"""
    name = cursor.name()
    shape = tuple(cursor.number("Q") for _ in range(cursor.number("I")))[::-1]
    return name, shape, cursor.number("I"), cursor.number("Q")


def _stored(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int) -> StoredTensor:
    try:
        quantisation = GGMLQuantizationType(kind)
    except ValueError:
        raise WeightsError(f"{path}: tensor {name}: {kind} is no GGML number type") from None
    if not shape or 0 in shape:
        raise WeightsError(f"{path}: tensor {name}: a shape of {list(shape)} holds nothing")
    block_size, block_bytes = GGML_QUANT_SIZES[quantisation]
    if shape[-1] % block_size:
        raise WeightsError(f"{path}: tensor {name}: rows of {shape[-1]} do not divide into blocks of {block_size}")
    num_bytes = math.prod(shape) // block_size * block_bytes
    return StoredTensor(name, shape, quantisation.name, path, offset, num_bytes, decoder(path, name, quantisation))


_NAMES = MappingProxyType({"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"})
_LAYER_NAMES = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)


def as_hf(file: GgufFile, architecture: str, head_dim: int) -> dict[str, StoredTensor]:
    """The file's tensors under HF's names.  Names unknown here stay as they are, for the loader to refuse.

    The llama architecture stores the rows of each q and k head as pairs (i, i + H/2) side by side; HF has the first
    half first.  Other architectures keep HF's order.
    """
    tensors = {}
    for name, tensor in file.tensors.items():
        if name == ROPE_DIVISORS:
            continue
        hf_name = _hf_name(name)
        if architecture == "llama" and re.search(r"\.self_attn\.[qk]_proj\.", hf_name):
            tensor = _with_halves_first(tensor, head_dim)
        tensors[hf_name] = tensor
    return tensors


def _hf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem):
        layer, part = match.groups()
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}" if part in _LAYER_NAMES else name
    return f"{_NAMES[stem]}.{kind}" if stem in _NAMES else name


def _with_halves_first(tensor: StoredTensor, head_dim: int) -> StoredTensor:
    """Rows of a head, stored: 0, H/2, 1, H/2 + 1, ...; wanted: 0, 1, ..., H/2, H/2 + 1, ..."""
    if tensor.num_rows % head_dim:
        raise WeightsError(f"{tensor.file}: tensor {tensor.name}: {tensor.num_rows} rows are no heads of {head_dim}")

    def reorder(rows: np.ndarray) -> np.ndarray:
        return rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)

    return dataclasses.replace(tensor, row_granularity=head_dim, reorder=reorder)
