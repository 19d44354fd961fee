"""The inner loops of attention: a tile of keys and values against many queries of one kv head, in float32 with AVX-512.

Keys are turned, so that a vector holds one number of 16 keys: scores are then sums of vectors times a broadcast number
of a query, without a sum over lanes.  Six rows are multiplied at a time, which uses each vector six times from its
register.  A row's result is the same bits whatever rows are beside it: each number is one chain of additions in a fixed
order.
"""

from __future__ import annotations

from llvmlite import ir

from pallas_kernels.cpu.emit import (
    LANES, Emitter, broadcast, f32, f32x16, fma, function, greatest_lane, i32, i32x16, i64, ptr, sum_lanes,
)  # fmt: skip
from pallas_kernels.cpu.elementwise import exp
from pallas_kernels.cpu.kv_formats import Format
from pallas_kernels.cpu.tiles import prefetch, transposed

TILE_KEYS = 64
FLOAT = 4
LOWEST = -1e29
"""What the greatest score is before any key; scores of keys that are not seen lie far below."""
_MASKED = -1e30
_ROWS = 6
"""At a time: with four vectors each, 24 sums stay in registers."""
_VECTORS = 4


class Products:
    """C = A @ B, or C * factors + A @ B, for any number of rows; the functions are shared by all calls in a module."""

    def __init__(self, module: ir.Module, name: str):
        self._module, self._name = module, name

    def emit(
        self, b: Emitter, a, a_stride: int, right, right_stride: int, c, c_stride: int, rows, depth, vectors: int,
        factors=None,
    ) -> None:  # fmt: skip
        """A f32[rows, depth], B f32[depth, 16 * vectors] and C by rows of as many bytes as said."""
        arguments = lambda row, at: [
            b.at(a, b.times(row, a_stride)), b.at(right, 64 * at), b.at(b.at(c, b.times(row, c_stride)), 64 * at),
            depth,
            b.at(factors, b.times(row, FLOAT)) if factors is not None else b.untyped(c),
        ]
        for at in range(0, vectors, _VECTORS):
            width = min(_VECTORS, vectors - at)
            kernel = lambda count: self._function(count, width, a_stride, right_stride, c_stride, factors is not None)
            whole = b.times(b.sdiv(rows, b.int(_ROWS)), _ROWS)
            with b.loop(0, whole, _ROWS) as row:
                b.call(kernel(_ROWS), arguments(row, at))
            for count in range(1, _ROWS):
                with b.if_then(b.icmp_signed("==", b.sub(rows, whole), b.int(count))):
                    b.call(kernel(count), arguments(whole, at))

    def _function(self, rows: int, vectors: int, a_stride: int, right_stride: int, c_stride: int, accumulates: bool):
        kind = "add" if accumulates else "set"
        name = f"{self._name}_{kind}_{rows}_{vectors}_{a_stride}_{right_stride}_{c_stride}"
        made = self._module.globals.get(name)
        if made is not None:
            return made
        made, b = function(self._module, name, ir.VoidType(), [ptr, ptr, ptr, i64, ptr])
        made.linkage = "internal"
        made.attributes.add("noinline")
        a, right, c, depth, factors = made.args
        sums = [[b.alloca_once(f32x16, 64) for _ in range(vectors)] for _ in range(rows)]
        for row, line in enumerate(sums):
            factor = broadcast(b, b.read(factors, row * FLOAT, f32), f32x16) if accumulates else None
            for at, kept in enumerate(line):
                start = b.fmul(b.read(c, row * c_stride + 64 * at, f32x16), factor) if accumulates else zeros()
                b.store(start, kept)
        with b.loop(0, depth) as step:
            line = b.at(right, b.times(step, right_stride))
            shared = [b.read(line, 64 * at, f32x16) for at in range(vectors)]
            column = b.at(a, b.times(step, FLOAT))
            for row, kept in enumerate(sums):
                value = broadcast(b, b.read(column, row * a_stride, f32), f32x16)
                for at, total in enumerate(kept):
                    b.store(fma(b, value, shared[at], b.load(total, typ=f32x16)), total)
        for row, line in enumerate(sums):
            for at, kept in enumerate(line):
                b.write(b.load(kept, typ=f32x16), c, row * c_stride + 64 * at)
        b.ret_void()
        return made


def turn_keys(b: Emitter, kind: Format, source: ir.Value, target: ir.Value, ahead: ir.Value) -> None:
    """16 keys from `source` on, as columns of `target` f32[head_dim, TILE_KEYS]; those at `ahead` are fetched."""
    rows = [b.at(source, key * kind.row_bytes) for key in range(LANES)]
    scales = [kind.scale(b, row) for row in rows]
    with b.loop(0, kind.head_dim // LANES) as part:
        share = LANES * kind.row_bytes * LANES // kind.head_dim
        for line in range(0, share, 64):
            prefetch(b, b.at(ahead, b.plus(b.times(part, share), line)))
        lines = [kind.read(b, row, part, scale) for row, scale in zip(rows, scales)]
        place = b.at(target, b.times(part, LANES * TILE_KEYS * FLOAT))
        for at, line in enumerate(transposed(b, lines)):
            b.write(line, place, at * TILE_KEYS * FLOAT)


def copy_values(b: Emitter, kind: Format, source: ir.Value, target: ir.Value, ahead: ir.Value) -> None:
    """16 values from `source` on, as rows of `target` f32[16, head_dim]; those at `ahead` are fetched."""
    with b.loop(0, LANES) as key:
        row = b.at(source, b.times(key, kind.row_bytes))
        place, scale = b.at(target, b.times(key, kind.head_dim * FLOAT)), kind.scale(b, row)
        for line in range(0, kind.row_bytes, 64):
            prefetch(b, b.at(ahead, b.plus(b.times(key, kind.row_bytes), line)))
        for part in range(kind.head_dim // LANES):
            b.write(kind.read(b, row, part, scale), place, 64 * part)


def weigh(b: Emitter, scores, greatest, total, factor, position=None, first=None, length=None) -> None:
    """Makes weights of one row's scores of a tile: e ** (score - the greatest so far).

    Updates the greatest (f32[1]) and the sum of weights so far (by lane, f32[16]), and writes by what earlier sums are
    to be multiplied.  With a position: of the tile, where the row sees only keys first .. length - 1.
    """
    lines = [b.read(scores, 64 * at, f32x16) for at in range(TILE_KEYS // LANES)]
    if position is not None:
        low, high = broadcast(b, b.sub(first, position), i32x16), broadcast(b, b.sub(length, position), i32x16)
        for at, line in enumerate(lines):
            key = ir.Constant(i32x16, [LANES * at + lane for lane in range(LANES)])
            seen = b.and_(b.icmp_signed(">=", key, low), b.icmp_signed("<", key, high))
            lines[at] = b.select(seen, line, ir.Constant(f32x16, [_MASKED] * LANES))
    before = b.read(greatest, 0, f32)
    best = lines[0]
    for line in lines[1:]:
        best = b.select(b.fcmp_ordered(">", line, best), line, best)
    here = greatest_lane(b, best)
    now = b.select(b.fcmp_ordered(">", here, before), here, before)
    most = broadcast(b, now, f32x16)
    fading = exp(b, b.fsub(broadcast(b, before, f32x16), most))
    weights = [exp(b, b.fsub(line, most)) for line in lines]
    for at, weight in enumerate(weights):
        b.write(weight, scores, 64 * at)
    while len(weights) > 1:
        weights = [b.fadd(x, y) for x, y in zip(weights[::2], weights[1::2])]
    b.write(fma(b, b.read(total, 0, f32x16), fading, weights[0]), total, 0)
    b.write(now, greatest, 0)
    b.write(b.extract_element(fading, ir.Constant(i32, 0)), factor, 0)


def divide(b: Emitter, sums, total, out, parts: int) -> None:
    """The row's output: its sums of values over the sum of its weights."""
    share = broadcast(b, b.fdiv(ir.Constant(f32, 1.0), sum_lanes(b, b.read(total, 0, f32x16))), f32x16)
    for part in range(parts):
        b.write(b.fmul(b.read(sums, 64 * part, f32x16), share), out, 64 * part)


def zeros() -> ir.Constant:
    return ir.Constant(f32x16, [0.0] * LANES)
