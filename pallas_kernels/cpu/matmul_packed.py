"""y = x @ w.T in float32 on Intel's matrix tiles (AMX), for matrices that stay packed as GGUF's Q4_0, Q4_1 or Q8_0.

A weight is d * q + m, with one d and m for 32 weights of a row.  q is an integer that bfloat16 holds exactly, and a float32 is the
exact sum of three bfloat16 numbers: three products of tiles give the sums of x * q over 32 weights with the accuracy of float32.
Each is then multiplied by d, and m by the sum of those x.  That is half the products that weights of three parts take, and
nothing of w has to be split.

Matrices are stored in the order in which they are used (packed_layout).  Each thread takes panels of 32 rows of w, expands q to bfloat16
as it reads them, and multiplies them with all rows of x, which were split before.  The last sums wait in memory while the next
products run.  Every element of y is summed over k in the same order whatever the number of rows, so a row's result does not
depend on its batch (of more than eight; up to eight rows are multiplied in plain float32).

Of the eight tiles five are in use, and tiles are cleared behind their last use: while another thread of the core (of another
virtual machine, say) uses tiles as well, a core has few registers to rename them to, and products with eight live tiles take
2.5 times longer than with five.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from pallas_kernels.cpu.emit import Emitter, broadcast, f32, f32x16, fma, i8, i32x16, sum_lanes
from pallas_kernels.cpu.ffi_handler import add_handler, data, dim, wait_for_first
from pallas_kernels.cpu.packed_layout import BLOCK_BYTES, COLUMNS, DEPTH, NUM_FACTORS
from pallas_kernels.cpu.parts import PARTS, pairs, pairs_of_parts
from pallas_kernels.cpu.tiles import TILE_BYTES, TILE_ROWS, configured, load_tile, prefetch, store_tile, tile

FEW_ROWS = 8
"""Up to so many rows of x are multiplied without tiles."""
_PANEL = 2
"""Times COLUMNS rows of w are multiplied with each load of x."""
_FLOAT, _LINE = 4, 64
_X_BYTES = PARTS * TILE_BYTES + _LINE
"""One step of k of 16 rows of x: a tile for each part, then the rows' sums."""
_W_BYTES = TILE_BYTES + 2 * _LINE
"""One step of k of 16 rows of w: a tile of q, then d and m as floats."""
_PACK_STEPS = 12
"""Steps of k that are packed at a time: small enough that all threads share the packing of a few rows."""
_CACHED_BYTES = 5 << 18
"""Of packed rows of x that are multiplied with all panels before the next ones are: what stays in a core's L2."""
_AHEAD = 12
"""Steps that are fetched ahead."""
_HALF_BYTES = 2 * COLUMNS
_BYTES = ir.VectorType(i8, COLUMNS)
_NOTHING = ir.Constant(f32x16, [0.0] * 16)


def scratch_bytes(num_rows: int, depth: int, num_slots: int) -> tuple[int, int]:
    """Bytes of the packed rows of x, and of the threads' panels."""
    steps = depth // DEPTH
    return -(-num_rows // TILE_ROWS) * steps * _X_BYTES, num_slots * _PANEL * steps * _W_BYTES


def add_matmul_packed(module: ir.Module, name: str, num_slots: int, encoding: str) -> None:
    """The handler of (x f32[M, K], w u8[N / 16, K / 32 * bytes * 16]) -> (y f32[M, N], packed u8[], panels u8[]); K and N are
    multiples of 32."""

    def plan(b: Emitter, args: list[ir.Value], rets: list[ir.Value]):
        x, w = args
        rows, depth, columns = dim(b, x, 0), dim(b, x, 1), b.times(dim(b, w, 0), COLUMNS)
        steps = b.sdiv(depth, b.int(DEPTH))
        tiles = b.sdiv(b.plus(rows, TILE_ROWS - 1), b.int(TILE_ROWS))
        packs = b.sdiv(b.plus(steps, _PACK_STEPS - 1), b.int(_PACK_STEPS))
        panels = b.sdiv(columns, b.int(_PANEL * COLUMNS))
        run = b.sdiv(b.plus(panels, 4 * num_slots - 1), b.int(4 * num_slots))
        runs = b.sdiv(b.sub(b.add(panels, run), b.int(1)), run)
        few = b.icmp_signed("<=", rows, b.int(FEW_ROWS))
        num_first = b.select(few, rows if _has_minimum(encoding) else b.int(0), b.mul(tiles, packs))
        pointers = [data(b, buffer) for buffer in (x, w, *rets)]
        return [*pointers, rows, columns, steps, tiles, packs, panels, run, num_first], b.add(num_first, runs), num_first

    def chunk(b: Emitter, values: list[ir.Value], index: ir.Value, slot: ir.Value, job: ir.Value) -> None:
        x, w, y, packed, scratch, rows, columns, steps, tiles, packs, panels, run, num_first = values
        is_few = b.icmp_signed("<=", rows, b.int(FEW_ROWS))
        with b.if_else(b.icmp_signed("<", index, num_first)) as (prepare, multiply):
            with prepare, b.if_else(is_few) as (few, many):
                with few:
                    _sum_row(b, x, packed, steps, index)
                with many:
                    step = b.times(b.srem(index, packs), _PACK_STEPS)
                    stop = b.minimum(b.plus(step, _PACK_STEPS), steps)
                    _pack_rows(b, x, packed, rows, steps, b.sdiv(index, packs), step, stop)
            with multiply:
                wait_for_first(b, job)
                first = b.mul(b.sub(index, num_first), run)
                last = b.minimum(b.add(first, run), panels)
                with b.if_else(is_few) as (few, many):
                    with few:
                        for count in range(1, FEW_ROWS + 1):
                            with b.if_then(b.icmp_signed("==", rows, b.int(count))):
                                begin, end = b.times(first, _PANEL), b.times(last, _PANEL)
                                _multiply_few(b, x, w, y, packed, count, columns, steps, begin, end, encoding)
                    with many, configured(b, name):
                        own = b.at(scratch, b.mul(slot, b.times(steps, _PANEL * _W_BYTES)))
                        _Panels(b, w, packed, y, own, rows, columns, steps, encoding).multiply(first, last, tiles)

    add_handler(module, name, 2, 3, plan, chunk, num_slots)


def _has_minimum(encoding: str) -> bool:
    return NUM_FACTORS[encoding] == 2


def _read_factor(b: Emitter, at: ir.Value, number: int) -> ir.Value:
    """d (0) or m (1) of 16 rows of w."""
    halves = b.read(at, number * _HALF_BYTES, ir.VectorType(ir.HalfType(), COLUMNS), align=2)
    return b.fpext(halves, f32x16)


def _read_integers(b: Emitter, at: ir.Value, pair: int, encoding: str) -> tuple[ir.Value, ir.Value]:
    """q of weights `pair` and `pair` + 16 of 16 rows of w, as the bits of floats."""

    def bytes_of(index: int) -> ir.Value:
        return b.read(at, NUM_FACTORS[encoding] * _HALF_BYTES + COLUMNS * index, _BYTES, align=1)

    if encoding == "Q8_0":
        return tuple(b.bitcast(b.sitofp(bytes_of(k), f32x16), i32x16) for k in (pair, pair + 16))
    zero = 8 if encoding == "Q4_0" else 0
    table = ir.Constant(i32x16, [int(np.float32(q - zero).view(np.uint32)) for q in range(16)])
    both = b.zext(bytes_of(pair), i32x16)
    # The lookup reads the lowest four bits of an index.
    look_up = lambda index: b.intrinsic("llvm.x86.avx512.permvar.si.512", i32x16, [table, index])
    return look_up(both), look_up(b.lshr(both, b.splat(4)))


def _fetch_ahead(b: Emitter, at: ir.Value, block_bytes: int) -> None:
    """Of the packed matrix, which is read from one end to the other; beyond the end does no harm."""
    for line in range(0, block_bytes, _LINE):
        prefetch(b, b.at(at, _AHEAD * block_bytes + line))


def _sum_row(b: Emitter, x, sums, steps, row) -> None:
    """The sums of 32 of one row of x, for rows that are not packed."""
    with b.loop(0, steps) as step:
        place = b.plus(b.mul(row, steps), step)
        at = b.at(x, b.times(place, DEPTH * _FLOAT))
        b.write(sum_lanes(b, b.fadd(b.read(at, 0, f32x16), b.read(at, _LINE, f32x16))), sums, b.times(place, _FLOAT))


def _multiply_few(b: Emitter, x, w, y, sums, rows: int, columns, steps, first, last, encoding: str) -> None:
    """`rows` rows of x with 16 times first..last rows of w, in plain float32: sums of x * q over 32 weights, then the factors."""
    block_bytes = BLOCK_BYTES[encoding] * COLUMNS
    chains = 4 if rows <= 2 else 2  # sums that do not wait for each other
    inner = [[b.alloca_once(f32x16, 64) for _ in range(chains)] for _ in range(rows)]
    totals = [b.alloca_once(f32x16, 64) for _ in range(rows)]
    with b.loop(first, last) as panel:
        for total in totals:
            b.store(_NOTHING, total)
        with b.loop(0, steps) as step:
            at = b.at(w, b.times(b.add(b.mul(panel, steps), step), block_bytes))
            _fetch_ahead(b, at, block_bytes)
            for kept in (kept for chain in inner for kept in chain):
                b.store(_NOTHING, kept)
            places = [b.plus(b.times(steps, row), step) for row in range(rows)]
            for pair in range(COLUMNS):
                for half, q in enumerate(_read_integers(b, at, pair, encoding)):
                    for row, place in enumerate(places):
                        offset = b.plus(b.times(place, DEPTH * _FLOAT), (pair + 16 * half) * _FLOAT)
                        value = broadcast(b, b.read(x, offset, f32), f32x16)
                        kept = inner[row][(half + 2 * pair) % chains]
                        b.store(fma(b, value, b.bitcast(q, f32x16), b.load(kept, typ=f32x16)), kept)
            scale = _read_factor(b, at, 0)
            for chain, total, place in zip(inner, totals, places):
                whole = b.load(chain[0], typ=f32x16)
                for kept in chain[1:]:
                    whole = b.fadd(whole, b.load(kept, typ=f32x16))
                scaled = fma(b, whole, scale, b.load(total, typ=f32x16))
                if _has_minimum(encoding):
                    of_row = broadcast(b, b.read(sums, b.times(place, _FLOAT), f32), f32x16)
                    scaled = fma(b, of_row, _read_factor(b, at, 1), scaled)
                b.store(scaled, total)
        for row, total in enumerate(totals):
            place = b.plus(b.times(columns, row), b.times(panel, COLUMNS))
            b.write(b.load(total, typ=f32x16), y, b.times(place, _FLOAT))


def _pack_rows(b: Emitter, x, packed, rows, steps, row_tile, first, last) -> None:
    """Steps first..last of k of 16 rows of x, as [row tile, step] of _X_BYTES."""
    with b.loop(first, last) as step, b.loop(0, TILE_ROWS) as at:
        row = b.plus(b.times(row_tile, TILE_ROWS), at)
        is_row = b.icmp_signed("<", row, rows)
        source = b.times(b.add(b.mul(b.select(is_row, row, b.int(0)), steps), step), DEPTH * _FLOAT)
        low, high = (b.select(is_row, b.read(b.at(x, source), _LINE * half, f32x16), _NOTHING) for half in range(2))
        target = b.at(packed, b.times(b.add(b.mul(row_tile, steps), step), _X_BYTES))
        for part, values in enumerate(pairs_of_parts(b, low, high)):
            b.write(values, target, b.plus(b.times(at, _LINE), part * TILE_BYTES), 64)
        b.write(sum_lanes(b, b.fadd(low, high)), target, b.plus(b.times(at, _FLOAT), PARTS * TILE_BYTES))


class _Panels:
    """Emits the product of a run of panels of w with all rows of x.  Tiles 0 and 1 are sums, 4 is of x, 5 and 6 are of w."""

    def __init__(self, b: Emitter, w, packed, y, scratch, rows, columns, steps, encoding: str):
        self._b, self._w, self._packed, self._y = b, w, packed, y
        self._rows, self._columns, self._steps, self._encoding = rows, columns, steps, encoding
        bytes_of_part = b.times(steps, _W_BYTES)
        self._parts = [b.at(scratch, b.times(bytes_of_part, part)) for part in range(_PANEL)]
        self._waiting = b.alloca_once(ir.ArrayType(i8, 2 * _PANEL * TILE_BYTES), 64)
        self._totals = b.alloca_once(ir.ArrayType(i8, _PANEL * TILE_BYTES), 64)

    def multiply(self, first: ir.Value, last: ir.Value, tiles: ir.Value) -> None:
        b = self._b
        most = b.maximum(b.sdiv(b.int(_CACHED_BYTES), b.times(self._steps, _X_BYTES)), 1)
        blocks = b.sdiv(b.sub(b.add(tiles, most), b.int(1)), most)
        with b.loop(0, blocks) as block:
            start, stop = (b.sdiv(b.mul(tiles, at), blocks) for at in (block, b.plus(block, 1)))
            with b.loop(first, last) as panel:
                for part in range(_PANEL):
                    self._expand(panel, part)
                with b.loop(start, stop) as row_tile:
                    self._multiply_rows(panel, row_tile)

    def _expand(self, panel: ir.Value, part: int) -> None:
        b = self._b
        block_bytes = BLOCK_BYTES[self._encoding] * COLUMNS
        source = b.mul(b.plus(b.times(panel, _PANEL), part), b.times(self._steps, block_bytes))
        with b.loop(0, self._steps) as step:
            at = b.at(self._w, b.add(source, b.times(step, block_bytes)))
            target = b.at(self._parts[part], b.times(step, _W_BYTES))
            _fetch_ahead(b, at, block_bytes)
            for number in range(NUM_FACTORS[self._encoding]):
                b.write(_read_factor(b, at, number), target, TILE_BYTES + _LINE * number, 64)
            for pair in range(COLUMNS):
                b.write(pairs(b, *_read_integers(b, at, pair, self._encoding)), target, _LINE * pair, 64)

    def _multiply_rows(self, panel: ir.Value, row_tile: ir.Value) -> None:
        """16 rows of x.  Sums of one step of k wait in one half of `_waiting` while the next go to the other: both together fill a
        page, so that no store of the one looks like what a load of the other waits for."""
        b = self._b
        first_row = b.times(row_tile, TILE_ROWS)
        with b.loop(0, TILE_ROWS) as at:  # lines of y are far apart: fetch them while the sums are made
            row = b.minimum(b.add(first_row, at), b.sub(self._rows, b.int(1)))
            for part in range(_PANEL):
                prefetch(b, b.at(self._y, self._place(panel, row, part)), for_write=True)
        of_x = b.at(self._packed, b.mul(row_tile, b.times(self._steps, _X_BYTES)))
        for line in range(_PANEL * TILE_ROWS):
            b.write(_NOTHING, self._totals, _LINE * line, 64)
        for part in range(_PANEL):
            tile(b, "tilezero", part)
        with b.loop(0, self._steps) as step:
            self._multiply_step(of_x, step, self._half(step))
            with b.if_then(b.icmp_signed(">", step, b.int(0))):
                self._scale(of_x, b.plus(step, -1), self._half(b.plus(step, 1)))
        self._scale(of_x, b.plus(self._steps, -1), self._half(b.plus(self._steps, 1)))
        for line in range(TILE_ROWS):
            row = b.plus(first_row, line)
            with b.if_then(b.icmp_signed("<", row, self._rows)):
                for part in range(_PANEL):
                    total = b.read(self._totals, TILE_BYTES * part + _LINE * line, f32x16, 64)
                    b.write(total, self._y, self._place(panel, row, part))

    def _place(self, panel: ir.Value, row: ir.Value, part: int) -> ir.Value:
        b = self._b
        return b.times(b.plus(b.mul(row, self._columns), b.times(panel, _PANEL * COLUMNS), COLUMNS * part), _FLOAT)

    def _half(self, step: ir.Value) -> ir.Value:
        b = self._b
        return b.at(self._waiting, b.times(b.and_(step, b.int(1)), _PANEL * TILE_BYTES))

    def _multiply_step(self, of_x: ir.Value, step: ir.Value, half: ir.Value) -> None:
        b = self._b
        for part, of_w in enumerate(self._parts):
            load_tile(b, 5 + part, of_w, b.times(step, _W_BYTES))
        for part_x in reversed(range(PARTS)):  # the smallest first
            load_tile(b, 4, of_x, b.plus(b.times(step, _X_BYTES), part_x * TILE_BYTES))
            for part in range(_PANEL):
                tile(b, "tdpbf16ps", part, 4, 5 + part)
        for part in range(_PANEL):
            store_tile(b, part, half, part * TILE_BYTES)
            tile(b, "tilezero", part)

    def _scale(self, of_x: ir.Value, step: ir.Value, half: ir.Value) -> None:
        """Adds the sums of a step, times d, and m times the sums of x, to the totals."""
        b = self._b
        for part, of_w in enumerate(self._parts):
            factors = b.at(of_w, b.plus(b.times(step, _W_BYTES), TILE_BYTES))
            scale, minimum = b.read(factors, 0, f32x16, 64), b.read(factors, _LINE, f32x16, 64)
            for line in range(TILE_ROWS):
                offset = TILE_BYTES * part + _LINE * line
                total = fma(b, b.read(half, offset, f32x16, 64), scale, b.read(self._totals, offset, f32x16, 64))
                if _has_minimum(self._encoding):
                    place = b.plus(b.times(step, _X_BYTES), PARTS * TILE_BYTES + _FLOAT * line)
                    total = fma(b, broadcast(b, b.read(of_x, place, f32), f32x16), minimum, total)
                b.write(total, self._totals, offset, 64)
