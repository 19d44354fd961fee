"""Paged attention with AVX-512: writes a step's keys and values where they belong in the pool, then every token reads
its own, block by block, where they lie.

Tokens of one sequence are taken together with all query heads of a kv head, so that a tile of keys is read and turned
once for all of them; the softmax runs along, with one pass over keys and values.  While a tile is multiplied, the next
one is fetched. Keys that no token of a run sees are not touched, and those that one of them does not see have no
weight: unused slots may hold anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from llvmlite import ir

from pallas_kernels.cpu.attention_tile import (
    FLOAT, LOWEST, TILE_KEYS, Products, copy_values, divide, turn_keys, weigh, zeros,
)  # fmt: skip
from pallas_kernels.cpu.emit import LANES, Emitter, f32, f32x16, i1, i32, i64
from pallas_kernels.cpu.ffi_handler import add_handler, data, dim, wait_for_first
from pallas_kernels.cpu.kv_formats import Format, format_of
from pallas_kernels.cpu.tiles import prefetch

_RUN_ROWS = 96
"""Most queries that are taken together, if a token does not have more."""
_CHUNKS_OF_A_SLOT = 8
_WRITTEN_TOKENS = 64
"""A chunk of the write."""
_NUM_ARGUMENTS, _NUM_RESULTS = 11, 3


class _Call(NamedTuple):
    """What a call's chunks share: addresses of arguments and results, then counts."""

    q: ir.Value
    k: ir.Value
    v: ir.Value
    old_pool: ir.Value
    layer: ir.Value
    rows: ir.Value
    firsts: ir.Value
    lengths: ir.Value
    write_blocks: ir.Value
    write_slots: ir.Value
    tables: ir.Value
    out: ir.Value
    pool: ir.Value
    scratch: ir.Value
    tokens: ir.Value
    kv_heads: ir.Value
    group: ir.Value
    block: ir.Value
    blocks: ir.Value
    columns: ir.Value
    size: ir.Value
    runs: ir.Value
    writes: ir.Value

    def plane(self, b: Emitter, kind: Format, block: ir.Value, kv_head: ir.Value) -> ir.Value:
        """The keys of a block; its values lie behind them."""
        layer = b.sext(b.read(self.layer, 0, i32), i64)
        of_head = b.add(b.mul(b.add(b.mul(layer, self.blocks), block), self.kv_heads), kv_head)
        return b.at(self.pool, b.times(b.times(of_head, b.times(self.block, 2)), kind.row_bytes))


class _Scratch(NamedTuple):
    """A thread's memory: what belongs to the tile, then what belongs to each query."""

    keys: ir.Value
    values: ir.Value
    queries: ir.Value
    sums: ir.Value
    scores: ir.Value
    totals: ir.Value
    greatest: ir.Value
    factors: ir.Value
    firsts: ir.Value
    lengths: ir.Value

    @classmethod
    def of_thread(cls, b: Emitter, call: _Call, head_dim: int, slot: ir.Value) -> _Scratch:
        of_tile, of_row = _scratch_floats(head_dim)
        rows = b.times(b.maximum(b.sdiv(b.plus(call.group, LANES - 1), b.int(LANES)), _RUN_ROWS // LANES), LANES)
        place = b.at(call.scratch, b.mul(slot, b.plus(b.times(rows, sum(of_row) * FLOAT), sum(of_tile) * FLOAT)))
        places = []
        for size in [*of_tile, *(b.times(rows, floats) for floats in of_row)]:
            places.append(place)
            place = b.at(place, b.times(size, FLOAT))
        return cls(*places)


def _scratch_floats(head_dim: int) -> tuple[list[int], list[int]]:
    """Of the parts of a tile, and of those of a query, in the order of `_Scratch`."""
    return [head_dim * TILE_KEYS, TILE_KEYS * head_dim], [head_dim, head_dim, TILE_KEYS, LANES, 1, 1, 1, 1]


def scratch_bytes(group: int, head_dim: int, num_slots: int) -> int:
    """Of all threads, where a kv head has `group` query heads."""
    of_tile, of_row = _scratch_floats(head_dim)
    rows = max(-(-group // LANES) * LANES, _RUN_ROWS)
    return num_slots * FLOAT * (sum(of_tile) + rows * sum(of_row))


def add_attention(module: ir.Module, name: str, num_slots: int, dtype: str, head_dim: int, scale_bytes: int) -> None:
    """The handler of (q f32[T, N, H], k [T, K, lanes], v [T, K, lanes], pool [L, B, K, 2, P, lanes], layer i32[1], row
    i32[T], first i32[T], length i32[T], block i32[T], slot i32[T], tables i32[S, blocks]) -> (out f32[T, N, H], pool,
    scratch u8[]).

    k and v are what the pool stores; token t's go to slot[t] of block[t], and nowhere if that is the dead block or none
    of the pool.  The pool is written in place: argument and result are one buffer.  Token t sees keys first[t] ..
    length[t] - 1 of the sequence whose table is row[t]; length 0 is a token of padding, whose output is zero.  Tokens
    of a sequence are neighbours in order of their positions.  q is scaled already.  H and P are multiples of 16.
    """
    kind = format_of(dtype, head_dim, scale_bytes)
    products = Products(module, name)

    def plan(b: Emitter, args: list[ir.Value], rets: list[ir.Value]):
        q, _, _, pool, *_, tables = args
        tokens, kv_heads = dim(b, q, 0), dim(b, pool, 2)
        share = _CHUNKS_OF_A_SLOT * num_slots
        wanted = b.sdiv(b.plus(b.mul(tokens, kv_heads), share - 1), b.int(share))
        group = b.sdiv(dim(b, q, 1), kv_heads)
        size = b.minimum(wanted, b.maximum(b.sdiv(b.int(_RUN_ROWS), group), 1))
        runs = b.sdiv(b.sub(b.add(tokens, size), b.int(1)), size)
        writes = b.sdiv(b.plus(tokens, _WRITTEN_TOKENS - 1), b.int(_WRITTEN_TOKENS))
        pointers = [data(b, buffer) for buffer in (*args, *rets)]
        counts = [tokens, kv_heads, group, dim(b, pool, 4), dim(b, pool, 1), dim(b, tables, 1), size, runs, writes]
        return [*pointers, *counts], b.add(writes, b.mul(runs, kv_heads)), writes

    def chunk(b: Emitter, values: list[ir.Value], index: ir.Value, slot: ir.Value, job: ir.Value) -> None:
        call = _Call(*values)
        with b.if_else(b.icmp_signed("<", index, call.writes)) as (write, attend):
            with write:
                _write_tokens(b, call, kind, index)
            with attend:
                wait_for_first(b, job)
                at = b.sub(index, call.writes)
                first = b.mul(b.srem(at, call.runs), call.size)
                last = b.minimum(b.add(first, call.size), call.tokens)
                scratch = _Scratch.of_thread(b, call, head_dim, slot)
                _Attention(b, call, kind, products, b.sdiv(at, call.runs), scratch).attend_all(first, last)

    add_handler(module, name, _NUM_ARGUMENTS, _NUM_RESULTS, plan, chunk, num_slots)


def _read_int(b: Emitter, base: ir.Value, index: ir.Value) -> ir.Value:
    return b.sext(b.read(base, b.times(index, 4), i32), i64)


def _write_tokens(b: Emitter, call: _Call, kind: Format, index: ir.Value) -> None:
    """One chunk of the step's keys and values."""
    start = b.times(index, _WRITTEN_TOKENS)
    with b.loop(start, b.minimum(b.plus(start, _WRITTEN_TOKENS), call.tokens)) as token:
        block, slot = (_read_int(b, base, token) for base in (call.write_blocks, call.write_slots))
        is_real = b.and_(b.icmp_signed(">", block, b.int(0)), b.icmp_signed("<", block, call.blocks))
        with b.if_then(is_real), b.loop(0, call.kv_heads) as kv_head:
            source = b.times(b.add(b.mul(token, call.kv_heads), kv_head), kind.row_bytes)
            target = b.at(call.plane(b, kind, block, kv_head), b.times(slot, kind.row_bytes))
            for base, place in ((call.k, target), (call.v, b.at(target, b.times(call.block, kind.row_bytes)))):
                copy = [place, b.at(base, source), b.int(kind.row_bytes), ir.Constant(i1, 0)]
                b.intrinsic("llvm.memcpy.p0.p0.i64", ir.VoidType(), copy)


class _Keys(NamedTuple):
    """Keys low .. high - 1 of a sequence, in the tile that begins at `base`."""

    table: ir.Value
    base: ir.Value
    low: ir.Value
    high: ir.Value


class _Attention:
    """Emits the attention of runs of tokens of one sequence, for the query heads of one kv head."""

    def __init__(self, b: Emitter, call: _Call, kind: Format, products: Products, kv_head: ir.Value, scratch: _Scratch):
        self._b, self._call, self._kind, self._products = b, call, kind, products
        self._kv_head, self._group, self._at = kv_head, call.group, scratch
        self._line = kind.head_dim * FLOAT

    def attend_all(self, first: ir.Value, last: ir.Value) -> None:
        """Tokens first .. last - 1, run by run."""
        b = self._b
        token = b.alloca_once(i64, 8)
        b.store(first, token)
        with b.while_(lambda: b.icmp_signed("<", b.load(token, typ=i64), last)):
            here = b.load(token, typ=i64)
            end = self._end_of_run(here, last)
            with b.if_else(b.icmp_signed(">", self._length(here), b.int(0))) as (live, padding):
                with live:
                    self._attend(here, end, last)
                with padding:
                    with self._each_row(here, end) as (_, _, place):
                        for part in range(self._kind.head_dim // LANES):
                            b.write(zeros(), b.at(self._call.out, place), 64 * part)
            b.store(end, token)

    def _attend(self, token: ir.Value, end: ir.Value, last: ir.Value) -> None:
        b, at, kind = self._b, self._at, self._kind
        rows = b.times(b.sub(end, token), self._group)
        self._begin(token, end)
        tile = b.int(TILE_KEYS)
        first, stop = self._first(token), self._length(b.sub(end, b.int(1)))
        table, following = self._table(token), self._following(end, last)
        all_see = self._first(b.sub(end, b.int(1))), self._length(token)
        with b.loop(b.sdiv(first, tile), b.plus(b.sdiv(b.sub(stop, b.int(1)), tile), 1)) as index:
            base = b.mul(index, tile)
            past = b.add(base, tile)
            here = _Keys(table, base, b.maximum(first, base), b.minimum(stop, past))
            is_last = b.icmp_signed(">=", past, stop)
            ahead = _Keys(*(b.select(is_last, *pair) for pair in zip(following, (table, past, past, stop))))
            self._fetch(here, ahead)
            self._products.emit(
                b, at.queries, self._line, at.keys, TILE_KEYS * FLOAT, at.scores, TILE_KEYS * FLOAT,
                rows, b.int(kind.head_dim), TILE_KEYS // LANES,
            )  # fmt: skip
            is_whole = b.and_(b.icmp_signed("<=", all_see[0], base), b.icmp_signed("<=", past, all_see[1]))
            with b.if_else(is_whole) as (whole, partial):
                with whole:
                    self._weigh(rows, None)
                with partial:
                    self._weigh(rows, b.trunc(base, i32))
            begin = b.sub(here.low, base)
            self._products.emit(
                b, b.at(at.scores, b.times(begin, FLOAT)), TILE_KEYS * FLOAT,
                b.at(at.values, b.times(begin, self._line)), self._line, at.sums, self._line,
                rows, b.sub(here.high, here.low), kind.head_dim // LANES, at.factors,
            )  # fmt: skip
        with self._each_row(token, end) as (row, _, place):
            sums, total = b.at(at.sums, b.times(row, self._line)), b.at(at.totals, b.times(row, 64))
            divide(b, sums, total, b.at(self._call.out, place), kind.head_dim // LANES)

    def _begin(self, token: ir.Value, end: ir.Value) -> None:
        """Queries side by side, and nothing summed."""
        b, at = self._b, self._at
        with self._each_row(token, end) as (row, of, place):
            line = b.times(row, self._line)
            for part in range(self._kind.head_dim // LANES):
                b.write(b.read(self._call.q, b.plus(place, 64 * part), f32x16), at.queries, b.plus(line, 64 * part))
                b.write(zeros(), at.sums, b.plus(line, 64 * part))
            b.write(zeros(), at.totals, b.times(row, 64))
            b.write(ir.Constant(f32, LOWEST), at.greatest, b.times(row, FLOAT))
            for source, target in ((self._call.firsts, at.firsts), (self._call.lengths, at.lengths)):
                b.write(b.read(source, b.times(of, 4), i32), target, b.times(row, 4))

    def _weigh(self, rows: ir.Value, position: ir.Value | None) -> None:
        b, at = self._b, self._at
        with b.loop(0, rows) as row:
            own = lambda base, size: b.at(base, b.times(row, size))
            bounds = []
            if position is not None:
                bounds = [position, *(b.read(own(base, 4), 0, i32) for base in (at.firsts, at.lengths))]
            scores, totals = own(at.scores, TILE_KEYS * FLOAT), own(at.totals, 64)
            weigh(b, scores, own(at.greatest, 4), totals, own(at.factors, 4), *bounds)

    def _fetch(self, here: _Keys, ahead: _Keys) -> None:
        """Keys and values of a tile, by 16; and those of the next one towards the caches, a few lines with each of
        them: more at once would wait for each other."""
        b, at, kind = self._b, self._at, self._kind
        with b.loop(0, TILE_KEYS, LANES) as key:
            is_ahead = self._is_any(ahead, key)
            # What is fetched already costs nothing to fetch again.
            next_keys = self._address(ahead.table, b.select(is_ahead, b.add(ahead.base, key), ahead.low))
            with b.if_else(self._is_any(here, key)) as (is_here, nothing):
                with is_here:
                    keys = self._address(here.table, b.add(here.base, key))
                    turn_keys(b, kind, keys, b.at(at.keys, b.times(key, FLOAT)), next_keys)
                    target = b.at(at.values, b.times(key, self._line))
                    copy_values(b, kind, self._values(keys), target, self._values(next_keys))
                with nothing, b.if_then(is_ahead), b.loop(0, LANES * kind.row_bytes, 64) as line:
                    prefetch(b, b.at(next_keys, line))
                    prefetch(b, b.at(self._values(next_keys), line))

    def _is_any(self, keys: _Keys, offset: ir.Value) -> ir.Value:
        """Whether any of 16 keys of a tile is one of `keys`."""
        b = self._b
        position = b.add(keys.base, offset)
        return b.and_(b.icmp_signed("<", position, keys.high), b.icmp_signed(">", b.plus(position, LANES), keys.low))

    def _values(self, keys: ir.Value) -> ir.Value:
        return self._b.at(keys, self._b.times(self._call.block, self._kind.row_bytes))

    def _address(self, table: ir.Value, position: ir.Value) -> ir.Value:
        """Of the key at a position, with a block of another pool read as the dead one."""
        b, call = self._b, self._call
        block = _read_int(b, table, b.sdiv(position, call.block))
        block = b.select(b.icmp_unsigned("<", block, call.blocks), block, b.int(0))
        offset = b.times(b.srem(position, call.block), self._kind.row_bytes)
        return b.at(call.plane(b, self._kind, block, self._kv_head), offset)

    def _following(self, end: ir.Value, last: ir.Value) -> _Keys:
        """The first keys of the run behind this one; none if there is no run."""
        b = self._b
        token = b.minimum(end, b.sub(last, b.int(1)))
        first = self._first(token)
        base = b.mul(b.sdiv(first, b.int(TILE_KEYS)), b.int(TILE_KEYS))
        high = b.select(b.icmp_signed("<", end, last), self._length(token), b.int(0))
        return _Keys(self._table(token), base, first, high)

    def _end_of_run(self, token: ir.Value, last: ir.Value) -> ir.Value:
        """The first token behind `token` that is of another sequence, or padding where it is not."""
        b = self._b
        end = b.alloca_once(i64, 8)
        b.store(b.plus(token, 1), end)
        row, is_live = _read_int(b, self._call.rows, token), b.icmp_signed(">", self._length(token), b.int(0))

        def goes_on() -> ir.Value:
            at = b.load(end, typ=i64)
            there = b.minimum(at, b.sub(last, b.int(1)))
            is_same = b.and_(
                b.icmp_signed("==", _read_int(b, self._call.rows, there), row),
                b.icmp_signed("==", b.icmp_signed(">", self._length(there), b.int(0)), is_live),
            )
            return b.and_(b.icmp_signed("<", at, last), is_same)

        with b.while_(goes_on):
            b.store(b.plus(b.load(end, typ=i64), 1), end)
        return b.load(end, typ=i64)

    @contextmanager
    def _each_row(self, token: ir.Value, end: ir.Value) -> Iterator[tuple[ir.Value, ir.Value, ir.Value]]:
        """Loops over a run's queries: (its row among them, its token, bytes before it in q and out)."""
        b = self._b
        with b.loop(token, end) as at, b.loop(0, self._group) as head:
            heads = b.times(self._call.kv_heads, self._group)
            query = b.add(b.add(b.mul(at, heads), b.times(self._kv_head, self._group)), head)
            row = b.add(b.times(b.sub(at, token), self._group), head)
            yield row, at, b.times(query, self._line)

    def _table(self, token: ir.Value) -> ir.Value:
        b = self._b
        return b.at(self._call.tables, b.times(b.mul(_read_int(b, self._call.rows, token), self._call.columns), 4))

    def _first(self, token: ir.Value) -> ir.Value:
        return _read_int(self._b, self._call.firsts, token)

    def _length(self, token: ir.Value) -> ir.Value:
        return _read_int(self._b, self._call.lengths, token)
