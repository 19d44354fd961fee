"""Functions of 16 floats."""

from __future__ import annotations

import math

from llvmlite import ir

from pallas_kernels.cpu.emit import LANES, Emitter, f32x16, fma, i32x16


def exp(b: Emitter, x: ir.Value) -> ir.Value:
    """e ** x for x <= 0: 2 ** n times a polynomial on [-ln 2 / 2, ln 2 / 2] (Cephes' expf); 0 below -87."""
    constant = lambda value: ir.Constant(f32x16, [value] * LANES)
    lowest = constant(-87.0)
    is_tiny = b.fcmp_ordered("<", x, lowest)
    x = b.select(is_tiny, lowest, x)
    n = b.intrinsic("llvm.rint.v16f32", f32x16, [b.fmul(x, constant(1 / math.log(2)))])
    r = fma(b, n, constant(-0.693359375), x)
    r = fma(b, n, constant(2.12194440e-4), r)
    y = constant(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = fma(b, y, r, constant(coefficient))
    y = b.fadd(fma(b, b.fmul(r, r), y, r), constant(1.0))
    power = b.shl(b.add(b.fptosi(n, i32x16), b.splat(127)), b.splat(23))
    return b.select(is_tiny, constant(0.0), b.fmul(y, b.bitcast(power, f32x16)))


def silu(b: Emitter, x: ir.Value) -> ir.Value:
    """x / (1 + e ** -x), with the exponential of a number that is not positive: it cannot overflow."""
    size = b.intrinsic("llvm.fabs.v16f32", f32x16, [x])
    fading = exp(b, b.fneg(size))
    one = ir.Constant(f32x16, [1.0] * LANES)
    is_positive = b.fcmp_ordered(">=", x, ir.Constant(f32x16, [0.0] * LANES))
    return b.fdiv(b.fmul(x, b.select(is_positive, one, fading)), b.fadd(one, fading))
