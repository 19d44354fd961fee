"""A float32 as the exact sum of three bfloat16 numbers, in the pairs that matrix tiles multiply."""

from __future__ import annotations

from llvmlite import ir

from pallas_kernels.cpu.emit import Emitter, f32x16, i32x16

PARTS = 3


def split(b: Emitter, x: ir.Value) -> list[ir.Value]:
    """The parts of 16 floats, each in the upper half of its lane; what is below the half of the last is garbage."""
    parts = []
    for _ in range(PARTS - 1):
        part = b.and_(b.add(b.bitcast(x, i32x16), b.splat(0x8000)), b.splat(0xFFFF0000))  # rounded to nearest
        x = b.fsub(x, b.bitcast(part, f32x16))  # exact
        parts.append(part)
    return [*parts, b.bitcast(x, i32x16)]


def pairs(b: Emitter, low: ir.Value, high: ir.Value) -> ir.Value:
    """bfloat16 pairs of the upper halves of lanes: of weights (j, j + 16) rather than neighbours, which both operands of a product
    may agree on and which takes a shift instead of a shuffle."""
    return b.or_(b.lshr(low, b.splat(16)), b.and_(high, b.splat(0xFFFF0000)))


def pairs_of_parts(b: Emitter, low: ir.Value, high: ir.Value) -> list[ir.Value]:
    """32 floats as 16 pairs for each part."""
    return [pairs(b, *halves) for halves in zip(split(b, low), split(b, high))]
