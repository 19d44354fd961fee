"""How the CPU's attention reads keys and values of a pool: 16 stored numbers as 16 floats, whatever the pool's dtype.

Reading is where narrow pools are made float32: a shift or a conversion in registers, and of a scaled pool a product
with the scale that lies behind each key or value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

from llvmlite import ir

from pallas_kernels.cpu.emit import LANES, Emitter, broadcast, f32, f32x16, i8, i16, i32, i32x16

_HALVES = ir.VectorType(ir.HalfType(), LANES)
_SHORTS = ir.VectorType(i16, LANES)
_BYTES = ir.VectorType(i8, LANES)


@dataclass(frozen=True)
class Format:
    """Of one key or value."""

    head_dim: int
    item_bytes: int
    scale_bytes: int
    factor: float
    read_lanes: Callable[[Emitter, ir.Value, int | ir.Value], ir.Value]

    @property
    def row_bytes(self) -> int:
        return self.head_dim * self.item_bytes + self.scale_bytes

    def scale(self, b: Emitter, row: ir.Value) -> ir.Value | None:
        """Of the key or value at `row`, in all lanes; None: it has none."""
        if not self.scale_bytes:
            return None if self.factor == 1.0 else ir.Constant(f32x16, [self.factor] * LANES)
        bits = b.zext(b.read(row, self.head_dim * self.item_bytes, i16, 1), i32)
        scale = b.bitcast(b.shl(bits, ir.Constant(i32, 16)), f32)
        return broadcast(b, b.fmul(scale, ir.Constant(f32, self.factor)), f32x16)

    def read(self, b: Emitter, row: ir.Value, part: int | ir.Value, scale: ir.Value | None) -> ir.Value:
        """Numbers 16 * part .. of the key or value at `row`."""
        lanes = self.read_lanes(b, row, b.times(part, LANES * self.item_bytes))
        return lanes if scale is None else b.fmul(lanes, scale)


def format_of(dtype: str, head_dim: int, scale_bytes: int) -> Format:
    item_bytes, factor, read_lanes = _READERS[dtype]
    return Format(head_dim, item_bytes, scale_bytes, factor, read_lanes)


def _read_float32(b: Emitter, row: ir.Value, offset) -> ir.Value:
    return b.read(row, offset, f32x16)


def _read_bfloat16(b: Emitter, row: ir.Value, offset) -> ir.Value:
    """The upper half of a float32."""
    bits = b.zext(b.read(row, offset, _SHORTS, 2), i32x16)
    return b.bitcast(b.shl(bits, b.splat(16)), f32x16)


def _read_float16(b: Emitter, row: ir.Value, offset) -> ir.Value:
    return b.fpext(b.read(row, offset, _HALVES, 2), f32x16)


def _read_int8(b: Emitter, row: ir.Value, offset) -> ir.Value:
    return b.sitofp(b.sext(b.read(row, offset, _BYTES, 1), i32x16), f32x16)


def _read_float8_e4m3(b: Emitter, row: ir.Value, offset) -> ir.Value:
    """As float16: the same bits, 2**8 too small."""
    bits = b.zext(b.read(row, offset, _BYTES, 1), _SHORTS)
    of = lambda value: ir.Constant(_SHORTS, [value] * LANES)
    sign, rest = b.shl(b.and_(bits, of(0x80)), of(8)), b.shl(b.and_(bits, of(0x7F)), of(7))
    return b.fpext(b.bitcast(b.or_(sign, rest), _HALVES), f32x16)


_READERS = MappingProxyType({
    "float32": (4, 1.0, _read_float32),
    "bfloat16": (2, 1.0, _read_bfloat16),
    "float16": (2, 1.0, _read_float16),
    "int8": (1, 1.0, _read_int8),
    "float8_e4m3fn": (1, 256.0, _read_float8_e4m3),
})
