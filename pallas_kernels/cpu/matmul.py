"""y = x @ w.T of float32 matrices on Intel's matrix tiles (AMX).

A float32 is the exact sum of three bfloat16 numbers.  Of the nine products of parts the six largest are computed and summed in
float32 (what XLA calls BF16_BF16_F32_X6); the three left out are below 2^-24 of the product, the rounding of float32 itself.
Up to eight rows of x are multiplied in float32 as they are.
Six products of tiles take 2.7 times less than the same product in AVX-512's float32.

Each thread takes panels of 32 rows of w: splits them once, as it reads them, and multiplies them with all rows of x, which
were split and brought into the tiles' order before.  Every element of y is summed over k in the same order whatever the
number of rows, so a row's result does not depend on its batch (of more than eight).
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir

from pallas_kernels.cpu.emit import Emitter, f32x16, fma, i1, i8, i32x16, sum_lanes
from pallas_kernels.cpu.ffi_handler import add_handler, data, dim, wait_for_first
from pallas_kernels.cpu.parts import PARTS, pairs_of_parts
from pallas_kernels.cpu.tiles import TILE_BYTES, TILE_ROWS, configured, load_tile, prefetch, store_tile, tile, transposed

FEW_ROWS = 8
"""Up to so many rows of x, splitting w would cost more than multiplying in float32 does."""
PANEL_ROWS = 32
"""Rows of w a panel: two tiles."""
TILE_DEPTH = 32
"""bfloat16 a tile row."""
_STEP_BYTES = 2 * PARTS * TILE_BYTES
"""Two tiles of each part: one step of k of a panel of w, and of a pair of row tiles of x."""
_PACK_STEPS = 12
"""Steps of k that are packed at a time: small enough that all threads share the packing of a few rows."""
_PRODUCTS = ((0, 2), (0, 1), (1, 1), (1, 0), (2, 0), (0, 0))
"""(part of w, part of x), smallest first but for what keeps tiles loaded."""
_FLOAT = 4
_CACHED_BYTES = 5 << 18
"""Of packed rows of x that are multiplied with all panels before the next ones are: what stays in a core's L2."""
_STEP_OF_W = TILE_DEPTH * _FLOAT
_RUN_PANELS = 100
"""Panels a thread from which there is more than one run for it."""


def scratch_bytes(num_rows: int, depth: int, num_slots: int) -> tuple[int, int]:
    """Bytes of the packed rows of x, and of the threads' panels."""
    pairs = -(-num_rows // (2 * TILE_ROWS))
    steps = depth // TILE_DEPTH
    return pairs * steps * _STEP_BYTES, 2 * num_slots * steps * _STEP_BYTES


def add_matmul(module: ir.Module, name: str, num_slots: int) -> None:
    """The handler of (x f32[M, K], w f32[N, K]) -> (y f32[M, N], packed u8[], panels u8[]); K and N are multiples of 32."""

    def plan(b: Emitter, args: list[ir.Value], rets: list[ir.Value]):
        x, w = args
        rows, depth, columns = dim(b, x, 0), dim(b, x, 1), dim(b, w, 0)
        steps = b.sdiv(depth, b.int(TILE_DEPTH))
        tiles = b.sdiv(b.plus(rows, TILE_ROWS - 1), b.int(TILE_ROWS))
        packs = b.sdiv(b.plus(steps, _PACK_STEPS - 1), b.int(_PACK_STEPS))
        panels = b.sdiv(columns, b.int(PANEL_ROWS))
        # One to four runs a thread: a run's first panel is split ahead of all products, a slow thread is waited for at the end.
        wanted = b.minimum(b.plus(b.sdiv(panels, b.int(_RUN_PANELS * num_slots)), 1), 4)
        share = b.times(wanted, num_slots)
        run = b.sdiv(b.sub(b.add(panels, share), b.int(1)), share)
        runs = b.sdiv(b.sub(b.plus(panels, run), b.int(1)), run)
        few = b.icmp_signed("<=", rows, b.int(FEW_ROWS))
        num_first = b.select(few, b.int(0), b.mul(tiles, packs))
        pointers = [data(b, buffer) for buffer in (x, w, *rets)]
        return [*pointers, rows, columns, steps, tiles, packs, panels, run, num_first], b.add(num_first, runs), num_first

    def chunk(b: Emitter, values: list[ir.Value], index: ir.Value, slot: ir.Value, job: ir.Value) -> None:
        x, w, y, packed, scratch, rows, columns, steps, tiles, packs, panels, run, num_first = values
        first = b.mul(b.sub(index, num_first), run)
        last = b.minimum(b.add(first, run), panels)
        with b.if_then(b.icmp_signed("<=", rows, b.int(FEW_ROWS))):
            for count in range(1, FEW_ROWS + 1):
                with b.if_then(b.icmp_signed("==", rows, b.int(count))):
                    _multiply_few(b, x, w, y, count, columns, steps, first, last)
        with b.if_then(b.icmp_signed(">", rows, b.int(FEW_ROWS))), b.if_else(
            b.icmp_signed("<", index, num_first)
        ) as (pack, multiply):
            with pack:
                step = b.times(b.srem(index, packs), _PACK_STEPS)
                stop = b.minimum(b.plus(step, _PACK_STEPS), steps)
                _pack_rows(b, x, packed, rows, steps, b.sdiv(index, packs), step, stop)
            with multiply:
                wait_for_first(b, job)
                own = b.at(scratch, b.mul(slot, b.times(steps, 2 * _STEP_BYTES)))
                with configured(b, name):
                    _Panels(b, w, packed, y, own, rows, columns, steps).multiply(first, last, tiles)

    add_handler(module, name, 2, 3, plan, chunk, num_slots)


def _multiply_few(b: Emitter, x, w, y, rows: int, columns, steps, first, last) -> None:
    """Panels first..last for `rows` rows of x, in plain float32."""
    nothing = ir.Constant(f32x16, [0.0] * 16)
    sums = [[b.alloca_once(f32x16, 64) for _ in range(2)] for _ in range(rows)]
    line = b.times(steps, TILE_DEPTH * _FLOAT)
    with b.loop(b.times(first, PANEL_ROWS), b.times(last, PANEL_ROWS)) as column:
        source = b.at(w, b.mul(column, line))
        for chain in sums:
            for kept in chain:
                b.store(nothing, kept)
        with b.loop(0, steps) as step:
            halves = _read(b, b.at(source, b.times(step, _STEP_OF_W)))
            for row, chain in enumerate(sums):
                at = b.at(x, b.plus(b.times(line, row), b.times(step, TILE_DEPTH * _FLOAT)))
                for weights, values, kept in zip(halves, _read(b, at), chain):
                    b.store(fma(b, weights, values, b.load(kept, typ=f32x16)), kept)
        for row, chain in enumerate(sums):
            total = sum_lanes(b, b.fadd(*(b.load(kept, typ=f32x16) for kept in chain)))
            b.write(total, y, b.times(b.plus(b.times(columns, row), column), _FLOAT))


def _read(b: Emitter, at: ir.Value) -> tuple[ir.Value, ir.Value]:
    return b.read(at, 0, f32x16), b.read(at, 64, f32x16)


def _pack_rows(b: Emitter, x, packed, rows, steps, tile, first, last) -> None:
    """Steps first..last of k of one row tile of x, as [pair of tiles, step, part, tile, pair of k, row]."""
    with b.loop(first, last) as step:
        by_part: list[list[ir.Value]] = [[] for _ in range(PARTS)]
        for at in range(TILE_ROWS):
            row = b.plus(b.times(tile, TILE_ROWS), at)
            is_row = b.icmp_signed("<", row, rows)
            line = b.times(b.mul(b.select(is_row, row, b.int(0)), steps), TILE_DEPTH * _FLOAT)
            parts = pairs_of_parts(b, *_read(b, b.at(x, b.plus(line, b.times(step, TILE_DEPTH * _FLOAT)))))
            for collected, part in zip(by_part, parts):
                collected.append(b.select(is_row, part, b.splat(0)))
        pair, place = b.sdiv(tile, b.int(2)), b.srem(tile, b.int(2))
        base = b.plus(b.times(b.add(b.mul(pair, steps), step), _STEP_BYTES), b.times(place, TILE_BYTES))
        for part, lines in enumerate(by_part):
            for at, line in enumerate(transposed(b, lines)):
                b.write(line, packed, b.plus(base, 2 * part * TILE_BYTES + 64 * at), 64)


class _Share(NamedTuple):
    """The pairs of row tiles of x that are multiplied with all panels before the next ones are."""

    start: ir.Value
    count: ir.Value


class _Panels:
    """Emits the product of a run of panels of w with all rows of x.  Tiles 0 to 3 are sums, 4 is of w, 5 of x: the fewer
    tiles live, the faster products are while another thread of the core uses tiles as well (matmul_packed).

    While one panel is multiplied, the next one is split, a few rows with each pair of row tiles of x: its reads from memory
    hide behind the products, and what the tiles load was stored long before.
    """

    def __init__(self, b: Emitter, w, packed, y, scratch, rows, columns, steps):
        self._b, self._w, self._packed, self._y = b, w, packed, y
        self._rows, self._columns, self._steps = rows, columns, steps
        self._row_bytes = b.times(steps, _STEP_OF_W)
        self._panel_bytes = b.times(self._row_bytes, PANEL_ROWS)
        self._buffers = scratch, b.at(scratch, b.times(steps, _STEP_BYTES))
        self._sums = b.alloca_once(ir.ArrayType(i8, 4 * TILE_BYTES), 64)

    def multiply(self, first: ir.Value, last: ir.Value, tiles: ir.Value) -> None:
        b = self._b
        pairs, full = b.sdiv(b.plus(tiles, 1), b.int(2)), b.sdiv(tiles, b.int(2))
        most = b.maximum(b.sdiv(b.int(_CACHED_BYTES), b.times(self._steps, _STEP_BYTES)), 1)
        blocks = b.sdiv(b.sub(b.add(pairs, most), b.int(1)), most)
        with b.loop(0, blocks) as block:
            start, stop = (b.sdiv(b.mul(pairs, at), blocks) for at in (block, b.plus(block, 1)))
            share = _Share(start, b.sub(stop, start))
            with b.loop(0, self._steps) as step:
                self._split(first, step, b.int(0), b.int(PANEL_ROWS))
            with b.loop(first, last) as panel:
                with b.loop(start, b.minimum(stop, full)) as pair:
                    self._block(panel, pair, 2, share, last)
                with b.if_then(b.icmp_signed("<", full, stop)):
                    self._block(panel, full, 1, share, last)

    def _block(self, panel: ir.Value, pair: ir.Value, width: int, share: _Share, last: ir.Value) -> None:
        """One or two row tiles of x, and the splitting of their share of the next panel."""
        b = self._b
        first_row = b.times(pair, 2 * TILE_ROWS)
        with b.loop(0, TILE_ROWS * width) as at:  # lines of y are far apart: fetch them while the sums are made
            row = b.minimum(b.add(first_row, at), b.sub(self._rows, b.int(1)))
            for line in (0, 64):
                prefetch(b, b.at(self._y, b.plus(self._place(panel, row, 0), line)), for_write=True)
        for index in range(2 * width):
            tile(b, "tilezero", index)
        place = b.sub(pair, share.start)
        to_split = b.select(b.icmp_signed("<", b.plus(panel, 1), last), b.int(PANEL_ROWS), b.int(0))
        begin, end = (b.sdiv(b.mul(to_split, at), share.count) for at in (place, b.plus(place, 1)))
        of_panel = self._buffer(panel)
        with b.loop(0, self._steps) as step:
            self._split(b.plus(panel, 1), step, begin, end)
            self._step(of_panel, step, pair, width)
        for index in range(2 * width):
            store_tile(b, index, self._sums, index * TILE_BYTES)
        for half in range(2):
            for place in range(width):
                at = (width * half + place) * TILE_BYTES
                lines = [b.read(self._sums, at + 64 * line, i32x16, 64) for line in range(TILE_ROWS)]
                for line, values in enumerate(transposed(b, lines)):
                    row = b.plus(first_row, TILE_ROWS * place + line)
                    with b.if_then(b.icmp_signed("<", row, self._rows)):
                        b.write(values, self._y, self._place(panel, row, TILE_ROWS * half))

    def _place(self, panel: ir.Value, row: ir.Value, column: int) -> ir.Value:
        b = self._b
        return b.times(b.plus(b.mul(row, self._columns), b.times(panel, PANEL_ROWS), column), _FLOAT)

    def _buffer(self, panel: ir.Value) -> ir.Value:
        """Neighbouring panels are split into buffers of their own."""
        return self._b.select(self._b.trunc(panel, i1), *self._buffers)

    def _split(self, panel: ir.Value, step: ir.Value, begin: ir.Value, end: ir.Value) -> None:
        """Rows begin..end of a panel at one step of k: [part, row] of 64 bytes, which is two tiles a part."""
        b = self._b
        source = b.plus(b.mul(panel, self._panel_bytes), b.times(step, _STEP_OF_W))
        target = b.at(self._buffer(panel), b.times(step, _STEP_BYTES))
        with b.loop(begin, end) as row:
            offset = b.add(source, b.mul(row, self._row_bytes))
            for part, values in enumerate(pairs_of_parts(b, *_read(b, b.at(self._w, offset)))):
                b.write(values, target, b.plus(b.times(row, 64), 2 * part * TILE_BYTES), 64)
            ahead = b.at(self._w, b.add(offset, self._panel_bytes))  # beyond the end does no harm
            for line in range(0, _STEP_OF_W, 64):
                prefetch(b, b.at(ahead, line))

    def _step(self, of_panel: ir.Value, step: ir.Value, pair: ir.Value, width: int) -> None:
        """One tile is loaded for each product: a tile is changed at a time, from product to product."""
        b = self._b
        of_w = b.times(step, _STEP_BYTES)
        of_x = b.times(b.add(b.mul(pair, self._steps), step), _STEP_BYTES)
        loaded_w, loaded_x = None, None
        half, place = 0, 0
        for part_w, part_x in _PRODUCTS:
            order = [(half, place), (1 - half, place)]
            if width == 2:
                order += [(1 - half, 1 - place), (half, 1 - place)]
            for half, place in order:
                if loaded_w != (part_w, half):
                    load_tile(b, 4, of_panel, b.plus(of_w, (2 * part_w + half) * TILE_BYTES))
                if loaded_x != (part_x, place):
                    load_tile(b, 5, self._packed, b.plus(of_x, (2 * part_x + place) * TILE_BYTES))
                loaded_w, loaded_x = (part_w, half), (part_x, place)
                tile(b, "tdpbf16ps", width * half + place, 4, 5)
