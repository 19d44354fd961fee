"""One spec tree per model: what each parameter is, from which initialisation, sharding and restore derive.

A spec tree has the model's own tree type with a `ParamSpec` at each leaf (None where the model has no such parameter).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jserve.models.packed import PackedMatrix, packed_row_bytes, packed_shape
from jserve.models.quantized import QuantizedMatrix, quantize_rows
from jserve.parallel.placement import Placement

Initialiser = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]
"""(key, shape, dtype) -> values, as in jax.nn.initializers."""


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor, and which rows of a parameter's output axis are its own.

    The output axis is `units` equal parts; of each part the tensor fills `start:stop`, in order.  So q, k and v of 3
    kv groups with G query heads of H are Piece(q, 3, 0, G*H), Piece(k, 3, G*H, (G+1)*H), Piece(v, 3, (G+1)*H, (G+2)*H).
    """

    name: str
    """As HF spells it; `{layer}` stands for the index on axis 0."""
    units: int = 1
    start: int = 0
    stop: int | None = None
    copies: int = 1
    """Parts of the output axis, one after another, that each unit of the tensor fills alike (kv heads that several
    devices keep)."""


@dataclass(frozen=True)
class ParamSpec:
    shape: tuple[int, ...]
    dtype: np.dtype
    logical_axes: tuple[str, ...]
    """One name an axis: layers, vocab, embed, heads, kv_heads, head, ffn.  parallel/ maps names to the mesh."""
    init: Initialiser
    source: tuple[Piece, ...]
    """The checkpoint tensors that fill it; together they cover every element once."""
    stacked: bool = False
    """Axis 0 counts layers, and each layer has its own checkpoint tensors."""
    quantized: bool = False
    """Kept as a QuantizedMatrix of this shape."""
    packed: str | None = None
    """Kept as a PackedMatrix of this shape and encoding."""

    def __post_init__(self):
        assert len(self.shape) == len(self.logical_axes), self
        parts = sorted((piece.start, piece.start + self.rows(piece)) for piece in self.source)
        starts, ends = zip(*parts)
        assert starts == (0, *ends[:-1]), f"pieces leave gaps or overlap: {self}"
        num_parts = {piece.units * piece.copies for piece in self.source}
        assert {ends[-1] * count for count in num_parts} == {self.num_rows}, f"pieces are not all: {self}"

    @property
    def layer_shape(self) -> tuple[int, ...]:
        return self.shape[1:] if self.stacked else self.shape

    @property
    def num_rows(self) -> int:
        """Length of the output axis, along which checkpoint tensors have their rows."""
        return self.layer_shape[0]

    @property
    def num_bytes(self) -> int:
        if self.packed is not None:
            return math.prod(self.shape[:-1]) * packed_row_bytes(self.shape[-1], self.packed)
        if self.quantized:
            return math.prod(self.shape) + 4 * math.prod(self.shape[:-1])
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, piece: Piece) -> int:
        """How many rows of one unit belong to `piece`."""
        return (self.num_rows // (piece.units * piece.copies) if piece.stop is None else piece.stop) - piece.start

    def checkpoint_shape(self, piece: Piece) -> tuple[int, ...]:
        """The shape that the piece's tensor must have in the checkpoint (of one layer where stacked)."""
        return (piece.units * self.rows(piece), *self.layer_shape[1:])

    def view(self, array: np.ndarray, piece: Piece, layer: int, copy: int = 0) -> np.ndarray:
        """Where a copy of `piece` goes, as a writable view [units, rows, ...] of the host array `array`."""
        target = array[layer] if self.stacked else array
        parts = piece.units, piece.copies
        target = target.reshape(*parts, self.num_rows // math.prod(parts), *target.shape[1:])
        assert np.shares_memory(target, array)
        return target[:, copy, piece.start : piece.stop]

    def reordered(self, array: np.ndarray, stored: ParamSpec) -> np.ndarray:
        """`array`, which has the order of the spec `stored`, in this one's: the same tensors, other pieces."""
        if self.source == stored.source:
            return array
        result = np.empty(self.shape, array.dtype)
        for _, piece, layer in checkpoint_tensors(self):
            [source] = [other for other in stored.source if other.name == piece.name]
            rows = stored.view(array, source, layer)
            for copy in range(piece.copies):
                target = self.view(result, piece, layer, copy)
                target[...] = rows.reshape(target.shape)
        return result


def leaves(specs: Any) -> list[ParamSpec]:
    return jax.tree.leaves(specs)


def num_bytes(specs: Any) -> int:
    """Bytes of all parameters."""
    return sum(spec.num_bytes for spec in leaves(specs))


def num_parameters(specs: Any) -> int:
    return sum(math.prod(spec.shape) for spec in leaves(specs))


def checkpoint_tensors(spec: ParamSpec) -> Iterator[tuple[str, Piece, int]]:
    """(name in HF's spelling, piece, layer) of every checkpoint tensor that fills `spec`."""
    for layer in range(spec.shape[0] if spec.stacked else 1):
        for piece in spec.source:
            yield piece.name.format(layer=layer), piece, layer


def init_params(specs: Any, key: jax.Array) -> Any:
    """Random parameters: leaf i is drawn from fold_in(key, i)."""
    flat, tree = jax.tree.flatten(specs)

    def draw(index: int, spec: ParamSpec) -> jax.Array | QuantizedMatrix:
        array = spec.init(jax.random.fold_in(key, index), spec.shape, spec.dtype)
        if not spec.quantized:
            return array
        values, scales = np.empty(spec.shape, np.int8), np.empty(spec.shape[:-1], np.float32)
        quantize_rows(np.asarray(array), values, scales)
        return QuantizedMatrix(jnp.asarray(values), jnp.asarray(scales))

    return tree.unflatten(draw(index, spec) for index, spec in enumerate(flat))


def shapes(specs: Any, placement: Placement) -> Any:
    """The tree of jax.ShapeDtypeStruct with shardings, for compiling without weights."""

    def placed(shape: tuple[int, ...], dtype: Any, axes: tuple[str, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=placement.sharding(axes, shape))

    def shape(spec: ParamSpec) -> Any:
        axes = spec.logical_axes
        if spec.packed is not None:
            return PackedMatrix(placed(packed_shape(spec.shape, spec.packed), jnp.dtype(jnp.uint8), axes), spec.packed)
        if spec.quantized:
            scales = placed(spec.shape[:-1], jnp.dtype(jnp.float32), axes[:-1])
            return QuantizedMatrix(placed(spec.shape, jnp.dtype(jnp.int8), axes), scales)
        return placed(spec.shape, spec.dtype, axes)

    return jax.tree.map(shape, specs)


def ones(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.ones(shape, dtype)


def zeros(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.zeros(shape, dtype)


normal = jax.nn.initializers.normal(0.02)
