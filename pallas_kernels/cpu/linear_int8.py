"""y = x @ w.T for int8 w, and float32 x in two int8 digits, each with a scale a row, on Intel's matrix tiles (AMX).

First chunks make the digits, each of up to 16 rows of x; later ones multiply a run of w's rows, loaded into tiles where
they lie, with a block of x's rows.  Sums are exact, and what is computed of them is `quantized_dot`'s formula.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from pallas_kernels.cpu.emit import Emitter, broadcast, f32, f32x16, fma, i8, i16, i16x32, i32, i32x16
from pallas_kernels.cpu.elementwise import silu
from pallas_kernels.cpu.ffi_handler import add_handler, data, dim, wait_for_first
from pallas_kernels.cpu.tiles import TILE_BYTES, TILE_ROWS, configured, load_tile, prefetch, store_tile, tile, transposed

DEPTH = 64
"""int8 a tile row."""
PANEL_ROWS = 32
"""Rows of w that are multiplied at a time: two tiles."""
FEW_ROWS = TILE_ROWS // 2
"""Both digits of up to so many rows of x fit into one tile."""
_BLOCK_TILES = 16
"""Of x that a chunk multiplies with its run of panels."""
_RUN_BYTES = 3 << 18
"""Of w that a chunk multiplies with its block of x: what stays in a core's L2."""
_RUNS = 2
"""A thread, at least: a slow one is waited for at the end."""
_FLOAT = 4
_TINY = 1e-30
_STEP = DEPTH * PANEL_ROWS


def scratch_bytes(num_rows: int, depth: int) -> int:
    """Of the digits of x in the tiles' order, and of its rows' scales."""
    tiles = -(-num_rows // TILE_ROWS)
    return tiles * (depth // DEPTH * 2 * TILE_BYTES + TILE_ROWS * _FLOAT)


def add_linear_int8(module: ir.Module, name: str, num_slots: int, is_gated: bool = False) -> None:
    """The handler of (x f32[M, K], w i8[N, K], scales f32[N]) -> (y f32[M, N], scratch u8[]); 64 divides K, 32 N.

    If it is gated, y f32[M, N / 2] is silu of the first half of the columns times the second.
    """

    def plan(b: Emitter, args: list[ir.Value], rets: list[ir.Value]):
        x, w, scales = args
        rows, depth, columns = dim(b, x, 0), dim(b, x, 1), dim(b, w, 0)
        tiles = _parts_of(b, rows, TILE_ROWS)
        panels = b.sdiv(columns, b.int(PANEL_ROWS))
        most = b.maximum(b.sdiv(b.int(_RUN_BYTES), b.times(depth, PANEL_ROWS)), 1)
        run = b.minimum(most, _parts_of(b, panels, _RUNS * num_slots))
        blocks, runs = _parts_of(b, tiles, _BLOCK_TILES), _parts_of(b, panels, run)
        pointers = [data(b, buffer) for buffer in (x, w, scales, *rets)]
        values = [*pointers, rows, depth, columns, tiles, panels, run, blocks]
        return values, b.add(tiles, b.mul(runs, blocks)), tiles

    def chunk(b: Emitter, values: list[ir.Value], index: ir.Value, slot: ir.Value, job: ir.Value) -> None:
        x, w, scales, y, scratch, rows, depth, columns, tiles, panels, run, blocks = values
        emit = _Linear(b, x, w, scales, y, scratch, rows, depth, columns, tiles, is_gated)
        with b.if_else(b.icmp_signed("<", index, tiles)) as (quantize, multiply):
            with quantize:
                emit.quantize(index)
            with multiply:
                number = b.sub(index, tiles)
                first = b.mul(b.sdiv(number, blocks), run)
                last = b.minimum(b.add(first, run), panels)
                emit.prefetch_panel(first)
                wait_for_first(b, job)
                start = b.times(b.srem(number, blocks), _BLOCK_TILES)
                with configured(b, name):
                    emit.multiply(first, last, start, b.minimum(b.plus(start, _BLOCK_TILES), tiles))

    add_handler(module, name, 3, 2, plan, chunk, num_slots)


def _parts_of(b: Emitter, total: ir.Value, size: int | ir.Value) -> ir.Value:
    return b.sdiv(b.sub(b.plus(total, size), b.int(1)), b.int(size))


class _Linear:
    """Emits both kinds of chunk.  The product has w's rows as rows and x's as columns, and is transposed at the end."""

    def __init__(self, b: Emitter, x, w, scales, y, scratch, rows, depth, columns, tiles, is_gated: bool):
        self._b, self._x, self._w, self._scales, self._y = b, x, w, scales, y
        self._digits, self._rows, self._depth = scratch, rows, depth
        # A panel's two tiles are 32 neighbours, or 16 of the gate and 16 of what it gates.
        self._is_gated, self._own_rows = is_gated, TILE_ROWS if is_gated else PANEL_ROWS
        self._between = b.sdiv(columns, b.int(2)) if is_gated else b.int(TILE_ROWS)
        self._width = self._between if is_gated else columns
        self._steps = b.sdiv(depth, b.int(DEPTH))
        self._tile_bytes = b.times(self._steps, 2 * TILE_BYTES)
        self._row_scales = b.at(scratch, b.mul(tiles, self._tile_bytes))
        self._is_few = b.icmp_signed("<=", rows, b.int(FEW_ROWS))

    # -- first chunks

    def quantize(self, row_tile: ir.Value) -> None:
        """16 rows of x as [step, digit] tiles of [four of k, row]; up to 8 as [step] tiles of [four of k, digit, row]."""
        b = self._b
        with b.if_else(self._is_few) as (few, many):
            with few:
                self._quantize(row_tile, FEW_ROWS)
            with many:
                self._quantize(row_tile, TILE_ROWS)

    def _quantize(self, row_tile: ir.Value, num_rows: int) -> None:
        b = self._b
        first_row = b.times(row_tile, TILE_ROWS)
        inverses = b.alloca_once(ir.ArrayType(f32, TILE_ROWS), 64)
        with b.loop(0, num_rows) as at:
            size = b.bitcast(self._greatest_size(self._line(b.add(first_row, at))), f32)
            scale = b.fmul(size, ir.Constant(f32, _float32(1 / 127)))
            tiny = ir.Constant(f32, _float32(_TINY))
            scale = b.select(b.fcmp_ordered("<", scale, tiny), tiny, scale)
            b.write(scale, self._row_scales, b.times(b.add(first_row, at), _FLOAT))
            b.write(b.fdiv(ir.Constant(f32, 1.0), scale), inverses, b.times(at, _FLOAT))
        target = b.at(self._digits, b.mul(row_tile, self._tile_bytes))
        lines = [self._line(b.plus(first_row, at)) for at in range(num_rows)]
        with b.loop(0, self._steps) as step:
            first, second = [], []
            for at, line in enumerate(lines):
                inverse = broadcast(b, b.read(inverses, at * _FLOAT, f32), f32x16)
                digits = self._digits_of(b.at(line, b.times(step, DEPTH * _FLOAT)), inverse)
                for kept, digit in zip((first, second), digits):
                    kept.append(digit)
            tiles = [first + second] if num_rows == FEW_ROWS else [first, second]
            for number, rows in enumerate(tiles):
                base = b.plus(b.times(step, len(tiles) * TILE_BYTES), number * TILE_BYTES)
                for at, line in enumerate(transposed(b, rows)):
                    quad = at // 4 + at % 4 * 4  # see _digits_of
                    b.write(line, target, b.plus(base, 64 * quad), 64)

    def _line(self, row: ir.Value) -> ir.Value:
        """A row of x; the last one for padding, whose product is never read."""
        b = self._b
        return b.at(self._x, b.times(b.mul(b.minimum(row, b.sub(self._rows, b.int(1))), self._depth), _FLOAT))

    def _greatest_size(self, line: ir.Value) -> ir.Value:
        """The bits of a row's max|x|; as integers they order floats by size, infinity and NaN last."""
        b = self._b
        greatest = [b.alloca_once(i32x16, 64) for _ in range(4)]
        for kept in greatest:
            b.store(b.splat(0), kept)
        with b.loop(0, self._depth, DEPTH) as k:
            for part, kept in enumerate(greatest):
                size = b.and_(b.read(line, b.plus(b.times(k, _FLOAT), 64 * part), i32x16), b.splat(0x7FFFFFFF))
                b.store(_greatest(b, [b.load(kept, typ=i32x16), size]), kept)
        return _greatest_lane(b, _greatest(b, [b.load(kept, typ=i32x16) for kept in greatest]))

    def _digits_of(self, line: ir.Value, inverse: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Both digits of 64 floats, as 64 bytes each, fours of them in the order that packing makes: 0, 4, 8, 12, 1, ..."""
        b = self._b
        parts: list[list[ir.Value]] = [[], []]
        for part in range(4):
            steps = b.fmul(b.read(line, 64 * part, f32x16), inverse)
            first = b.intrinsic("llvm.rint.v16f32", f32x16, [steps])
            rest = b.fmul(b.fsub(steps, first), ir.Constant(f32x16, [254.0] * 16))
            for kept, digit in zip(parts, (first, rest)):
                kept.append(self._to_int(digit))
        return tuple(self._packed(of_digit) for of_digit in parts)

    def _to_int(self, values: ir.Value) -> ir.Value:
        """Rounded to nearest; NaN is a number then, and never poison."""
        arguments = [values, self._b.splat(0), ir.Constant(i16, -1), ir.Constant(i32, 4)]
        return self._b.intrinsic("llvm.x86.avx512.mask.cvtps2dq.512", i32x16, arguments)

    def _packed(self, parts: list[ir.Value]) -> ir.Value:
        b = self._b
        pairs = [b.intrinsic("llvm.x86.avx512.packssdw.512", i16x32, list(pair)) for pair in (parts[:2], parts[2:])]
        return b.bitcast(b.intrinsic("llvm.x86.avx512.packsswb.512", ir.VectorType(i8, 64), pairs), i32x16)

    # -- later chunks

    def prefetch_panel(self, panel: ir.Value) -> None:
        b = self._b
        start = b.mul(panel, b.times(self._depth, self._own_rows))
        with b.loop(0, self._steps) as step:
            self._prefetch_step(start, step)

    def _prefetch_step(self, start: ir.Value, step: ir.Value) -> None:
        b = self._b
        for half in range(2):
            place = b.plus(start, b.times(b.mul(self._depth, self._between), half), b.times(step, _STEP // 2))
            for line in range(0, _STEP // 2, 64):
                prefetch(b, b.at(self._w, b.plus(place, line)))

    def multiply(self, first: ir.Value, last: ir.Value, start: ir.Value, stop: ir.Value) -> None:
        b = self._b
        end = b.sub(last, b.int(1))
        with b.if_else(self._is_few) as (few, many):
            with few, b.loop(first, last) as panel:
                self._block(panel, b.int(0), b.minimum(b.plus(panel, 1), end), self._few_sums)
            with many:
                with b.loop(first, last) as panel:
                    self._block(panel, start, b.minimum(b.plus(panel, 1), end), self._sums)
                with b.loop(b.plus(start, 1), stop) as row_tile, b.loop(first, last) as panel:
                    self._block(panel, row_tile, None, self._sums)

    def _block(self, panel: ir.Value, row_tile: ir.Value, next_panel: ir.Value | None, sums: Callable) -> None:
        """32 rows of w with a tile of rows of x."""
        b = self._b
        first_row = b.times(row_tile, TILE_ROWS)
        count = b.minimum(b.sub(self._rows, first_row), TILE_ROWS)
        base = b.at(self._y, b.times(b.plus(b.mul(first_row, self._width), b.times(panel, self._own_rows)), _FLOAT))
        row_bytes = b.times(self._width, _FLOAT)
        with b.loop(0, count) as at:  # lines of y are far apart: fetch them while the sums are made
            for line in range(0, self._own_rows * _FLOAT, 64):
                prefetch(b, b.at(base, b.plus(b.mul(at, row_bytes), line)), for_write=True)
        panel_bytes = b.times(self._depth, self._own_rows)
        of_x = b.at(self._digits, b.mul(row_tile, self._tile_bytes))
        ahead = None if next_panel is None else b.mul(next_panel, panel_bytes)
        row_scales = b.read(self._row_scales, b.times(first_row, _FLOAT), f32x16)
        halves = sums(b.at(self._w, b.mul(panel, panel_bytes)), of_x, ahead)
        by_half = []
        for half, read_line in enumerate(halves):
            lines = []
            for at in range(TILE_ROWS):
                column = b.plus(b.times(panel, self._own_rows), b.times(self._between, half), at)
                scale = broadcast(b, b.read(self._scales, b.times(column, _FLOAT), f32), f32x16)
                lines.append(b.bitcast(b.fmul(b.fmul(read_line(at), row_scales), scale), i32x16))
            by_half.append(transposed(b, lines))
        if self._is_gated:
            floats = ((b.bitcast(line, f32x16) for line in pair) for pair in zip(*by_half))
            by_half = [[b.fmul(silu(b, gate), up) for gate, up in floats]]
        for half, lines in enumerate(by_half):
            for at, line in enumerate(lines):
                with b.if_then(b.icmp_signed("<", b.int(at), count)):
                    b.write(line, base, b.plus(b.times(row_bytes, at), 64 * half))

    def _load_w(self, of_w: ir.Value, step: ir.Value) -> None:
        """Into tiles 4 and 5."""
        b = self._b
        for half in range(2):
            place = b.plus(b.times(b.mul(self._depth, self._between), half), b.times(step, DEPTH))
            load_tile(b, 4 + half, of_w, place, self._depth)

    def _sums(self, of_w: ir.Value, of_x: ir.Value, ahead: ir.Value | None) -> list[Callable[[int], ir.Value]]:
        """Tiles 0 and 1 are sums of the first digit, 2 and 3 of the second; 4 is of w, 6 of x: of few live tiles matmul_packed says
        why.  One tile changes from product to product."""
        b = self._b
        kept = b.alloca_once(ir.ArrayType(i8, 4 * TILE_BYTES), 64)
        for index in range(4):
            tile(b, "tilezero", index)
        with b.loop(0, self._steps) as step:
            loaded = None
            for half, digit in ((0, 0), (1, 0), (1, 1), (0, 1)):
                if loaded is None or loaded[0] != half:
                    place = b.plus(b.times(b.mul(self._depth, self._between), half), b.times(step, DEPTH))
                    load_tile(b, 4, of_w, place, self._depth)
                if loaded is None or loaded[1] != digit:
                    load_tile(b, 6, of_x, b.plus(b.times(step, 2 * TILE_BYTES), digit * TILE_BYTES))
                loaded = half, digit
                tile(b, "tdpbssd", 2 * digit + half, 4, 6)
            if ahead is not None:
                self._prefetch_step(ahead, step)
        for index in range(4):
            store_tile(b, index, kept, index * TILE_BYTES)
            tile(b, "tilezero", index)

        def line(half: int, at: int) -> ir.Value:
            first, second = (b.read(kept, (2 * digit + half) * TILE_BYTES + 64 * at, i32x16, 64) for digit in range(2))
            return self._joined(first, second)

        return [lambda at, half=half: line(half, at) for half in range(2)]

    def _few_sums(self, of_w: ir.Value, of_x: ir.Value, ahead: ir.Value) -> list[Callable[[int], ir.Value]]:
        """Tiles 0 and 1 are sums of both digits; 6 is of x."""
        b = self._b
        kept = b.alloca_once(ir.ArrayType(i8, 2 * TILE_BYTES), 64)
        for index in range(2):
            tile(b, "tilezero", index)
        with b.loop(0, self._steps) as step:
            self._load_w(of_w, step)
            load_tile(b, 6, of_x, b.times(step, TILE_BYTES))
            for half in range(2):
                tile(b, "tdpbssd", half, 4 + half, 6)
            self._prefetch_step(ahead, step)
        for index in range(2):
            store_tile(b, index, kept, index * TILE_BYTES)
            tile(b, "tilezero", index)
        swapped = ir.Constant(i32x16, [lane ^ FEW_ROWS for lane in range(TILE_ROWS)])

        def line(half: int, at: int) -> ir.Value:
            both = b.read(kept, half * TILE_BYTES + 64 * at, i32x16, 64)
            return self._joined(both, b.shuffle_vector(both, both, swapped))

        return [lambda at, half=half: line(half, at) for half in range(2)]

    def _joined(self, first: ir.Value, second: ir.Value) -> ir.Value:
        b = self._b
        step = ir.Constant(f32x16, [_float32(1 / 254)] * 16)
        return fma(b, b.sitofp(second, f32x16), step, b.sitofp(first, f32x16))


def _greatest(b: Emitter, vectors: list[ir.Value]) -> ir.Value:
    total, *rest = vectors
    for vector in rest:
        total = b.select(b.icmp_signed(">", vector, total), vector, total)
    return total


def _greatest_lane(b: Emitter, vector: ir.Value) -> ir.Value:
    for distance in (8, 4, 2, 1):
        lanes = ir.Constant(i32x16, [lane ^ distance for lane in range(16)])
        vector = _greatest(b, [vector, b.shuffle_vector(vector, vector, lanes)])
    return b.extract_element(vector, ir.Constant(i32, 0))


def _float32(value: float) -> float:
    """llvmlite writes constants with all their digits."""
    import numpy as np

    return float(np.float32(value))
