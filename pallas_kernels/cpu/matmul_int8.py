"""sums = x @ w.T of int8 in int32 on Intel's matrix tiles (AMX): exact, so the same as any other way of computing it.

Weights are loaded into tiles where they lie; rows of x are brought into the tiles' order first.  Each thread takes panels of 32
rows of w.
"""

from __future__ import annotations

from llvmlite import ir

from pallas_kernels.cpu.emit import Emitter, i1, i8, i32x16
from pallas_kernels.cpu.ffi_handler import add_handler, data, dim, wait_for_first
from pallas_kernels.cpu.tiles import TILE_BYTES, TILE_ROWS, configured, load_tile, prefetch, store_tile, tile, transposed

PANEL_ROWS = 32
DEPTH = 64
"""int8 a tile row."""
_PAIR_BYTES = 2 * TILE_BYTES
_PACK_STEPS = 12
_WORD = 4


def packed_bytes(num_rows: int, depth: int) -> int:
    return -(-num_rows // (2 * TILE_ROWS)) * (depth // DEPTH) * _PAIR_BYTES


def add_matmul_int8(module: ir.Module, name: str, num_slots: int) -> None:
    """The handler of (x i8[M, K], w i8[N, K]) -> (sums i32[M, N], packed u8[]); K is a multiple of 64, N of 32."""

    def plan(b: Emitter, args: list[ir.Value], rets: list[ir.Value]):
        x, w = args
        rows, depth, columns = dim(b, x, 0), dim(b, x, 1), dim(b, w, 0)
        steps = b.sdiv(depth, b.int(DEPTH))
        tiles = b.sdiv(b.plus(rows, TILE_ROWS - 1), b.int(TILE_ROWS))
        packs = b.sdiv(b.plus(steps, _PACK_STEPS - 1), b.int(_PACK_STEPS))
        panels = b.sdiv(columns, b.int(PANEL_ROWS))
        run = b.sdiv(b.plus(panels, 4 * num_slots - 1), b.int(4 * num_slots))
        runs = b.sdiv(b.sub(b.add(panels, run), b.int(1)), run)
        num_first = b.mul(tiles, packs)
        values = [*(data(b, buffer) for buffer in (x, w, *rets)), rows, columns, steps, tiles, packs, panels, run, num_first]
        return values, b.add(num_first, runs), num_first

    def chunk(b: Emitter, values: list[ir.Value], index: ir.Value, slot: ir.Value, job: ir.Value) -> None:
        x, w, y, packed, rows, columns, steps, tiles, packs, panels, run, num_first = values
        with b.if_else(b.icmp_signed("<", index, num_first)) as (pack, multiply):
            with pack:
                first = b.times(b.srem(index, packs), _PACK_STEPS)
                last = b.minimum(b.plus(first, _PACK_STEPS), steps)
                _pack_rows(b, x, packed, rows, steps, b.sdiv(index, packs), first, last)
            with multiply:
                wait_for_first(b, job)
                first = b.mul(b.sub(index, num_first), run)
                with configured(b, name), b.loop(first, b.minimum(b.add(first, run), panels)) as panel:
                    _multiply_panel(b, w, packed, y, rows, columns, steps, tiles, panel)

    add_handler(module, name, 2, 2, plan, chunk, num_slots)


def _pack_rows(b: Emitter, x, packed, rows, steps, tile_of_rows, first, last) -> None:
    """Steps first..last of one row tile of x, as [pair of tiles, step, tile, four of k, row]."""
    with b.loop(first, last) as step:
        lines = []
        for at in range(TILE_ROWS):
            row = b.plus(b.times(tile_of_rows, TILE_ROWS), at)
            is_row = b.icmp_signed("<", row, rows)
            place = b.times(b.add(b.mul(b.select(is_row, row, b.int(0)), steps), step), DEPTH)
            lines.append(b.select(is_row, b.read(x, place, i32x16), b.splat(0)))
        pair, half = b.sdiv(tile_of_rows, b.int(2)), b.srem(tile_of_rows, b.int(2))
        base = b.plus(b.times(b.add(b.mul(pair, steps), step), _PAIR_BYTES), b.times(half, TILE_BYTES))
        for at, line in enumerate(transposed(b, lines)):
            b.write(line, packed, b.plus(base, 64 * at), 64)


def _multiply_panel(b: Emitter, w, packed, y, rows, columns, steps, tiles, panel) -> None:
    """32 rows of w with all rows of x.  Tiles 0 to 3 are sums, 4 and 5 of w, 6 and 7 of x."""
    pairs = b.sdiv(tiles, b.int(2))
    sums = b.alloca_once(ir.ArrayType(i8, 4 * TILE_BYTES), 64)

    def block(pair: ir.Value, width: int) -> None:
        for index in range(2 * width):
            tile(b, "tilezero", index)
        line = b.times(steps, DEPTH)
        with b.loop(0, steps) as step:
            for half in range(2):
                source = b.plus(b.mul(b.plus(b.times(panel, PANEL_ROWS), TILE_ROWS * half), line), b.times(step, DEPTH))
                load_tile(b, 4 + half, w, source, line)
            for place in range(width):
                of_x = b.plus(b.times(b.add(b.mul(pair, steps), step), _PAIR_BYTES), place * TILE_BYTES)
                load_tile(b, 6 + place, packed, of_x)
            for half in range(2):
                for place in range(width):
                    tile(b, "tdpbssd", width * half + place, 4 + half, 6 + place)
        for half in range(2):
            for place in range(width):
                at = (width * half + place) * TILE_BYTES
                store_tile(b, width * half + place, sums, at)
                for number, values in enumerate(transposed(b, [b.read(sums, at + 64 * n, i32x16, 64) for n in range(16)])):
                    row = b.plus(b.times(pair, 2 * TILE_ROWS), TILE_ROWS * place + number)
                    column = b.plus(b.times(panel, PANEL_ROWS), TILE_ROWS * half)
                    with b.if_then(b.icmp_signed("<", row, rows)):
                        b.write(values, y, b.times(b.add(b.mul(row, columns), column), _WORD))

    panel_bytes = b.times(b.times(steps, DEPTH), PANEL_ROWS)
    with b.loop(0, panel_bytes, 64) as line:
        prefetch(b, b.at(w, b.add(b.mul(b.plus(panel, 1), panel_bytes), line)))  # the next panel; beyond the end does no harm
    with b.loop(0, pairs) as pair:
        block(pair, 2)
    with b.if_then(b.trunc(tiles, i1)):
        block(pairs, 1)
