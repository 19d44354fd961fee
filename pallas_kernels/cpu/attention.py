"""Paged attention in float32 with AVX-512: every token reads its own keys and values, block by block, where they lie.

Tokens of one sequence are taken together, so that a block is read from memory once for all of them and all their heads.  Scores
are kept whole: a first pass writes them, a second makes weights of them, a third sums values.  Only keys that a token sees are
multiplied, so unused slots may hold anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import contextmanager

from llvmlite import ir

from pallas_kernels.cpu.emit import LANES, Emitter, broadcast, f32, f32x16, greatest_lane, i32, i32x16, sum_lanes
from pallas_kernels.cpu.ffi_handler import add_handler, data, dim

TOKENS = 8
"""Most tokens that are taken together."""
_CHUNKS_OF_A_SLOT = 8
_FLOAT = 4
_MASKED = -1e30
_KEYS = 4
"""Keys a round of the sum of values: sums of even and odd ones do not wait for each other."""


def scratch_floats(group: int, num_keys: int, num_slots: int) -> int:
    """Floats of the scores of all threads; `num_keys` of the longest table, in whole blocks."""
    return num_slots * TOKENS * group * num_keys


def add_attention(module: ir.Module, name: str, num_slots: int, head_dim: int) -> None:
    """The handler of (q f32[T, N, H], pool f32[L, B, K, 2, P, H], layer i32[1], row i32[T], first i32[T], length i32[T],
    tables i32[S, blocks]) -> (out f32[T, N, H], scores f32[]).

    Token t sees keys first[t] .. length[t] - 1 of the sequence whose table is row[t]; length 0 is a token of padding, whose
    output is zero.  q is scaled already.  H and P are multiples of 16.
    """

    def plan(b: Emitter, args: list[ir.Value], rets: list[ir.Value]):
        q, pool, _, _, _, _, tables = args
        tokens, heads = dim(b, q, 0), dim(b, q, 1)
        kv_heads, block = dim(b, pool, 2), dim(b, pool, 4)
        blocks, columns = dim(b, pool, 1), dim(b, tables, 1)
        wanted = b.sdiv(b.plus(b.mul(tokens, kv_heads), _CHUNKS_OF_A_SLOT * num_slots - 1), b.int(_CHUNKS_OF_A_SLOT * num_slots))
        size = b.minimum(wanted, TOKENS)
        runs = b.sdiv(b.sub(b.add(tokens, size), b.int(1)), size)
        pointers = [data(b, buffer) for buffer in (*args, *rets)]
        counts = [tokens, heads, kv_heads, block, blocks, columns, size, runs]
        return [*pointers, *counts], b.mul(runs, kv_heads), b.int(0)

    def chunk(b: Emitter, values: list[ir.Value], index: ir.Value, slot: ir.Value, job: ir.Value) -> None:
        tokens, size, runs = values[9], values[15], values[16]
        kernel = _Attention(b, values, b.sdiv(index, runs), slot, head_dim)
        first = b.mul(b.srem(index, runs), size)
        last = b.minimum(b.add(first, size), tokens)
        token = b.alloca_once(first.type, 8)
        b.store(first, token)
        with b.while_(lambda: b.icmp_signed("<", b.load(token, typ=first.type), last)):
            here = b.load(token, typ=first.type)
            end = kernel.end_of_run(here, last)
            with b.if_else(b.icmp_signed(">", kernel.length(here), b.int(0))) as (live, padding):
                with live:
                    kernel.attend(here, end)
                with padding:
                    kernel.clear(here, end)
            b.store(end, token)

    add_handler(module, name, 7, 2, plan, chunk, num_slots)


class _Attention:
    """Emits the attention of a run of tokens of one sequence, for the query heads of one kv head."""

    def __init__(self, b: Emitter, values: list[ir.Value], kv_head: ir.Value, slot: ir.Value, head_dim: int):
        self._b, self._kv_head, self._parts = b, kv_head, head_dim // LANES
        (self._q, self._pool, self._layer, self._rows, self._firsts, self._lengths, self._tables, self._out, scores,
         _, self._heads, self._kv_heads, self._block, self._blocks, self._columns, _, _) = values
        self._group = b.sdiv(self._heads, self._kv_heads)
        self._head_bytes = head_dim * _FLOAT
        self._keys = b.mul(self._columns, self._block)
        own = b.mul(slot, b.times(b.mul(self._group, self._keys), TOKENS * _FLOAT))
        self._scores = b.at(scores, own)

    def length(self, token: ir.Value) -> ir.Value:
        return self._read_int(self._lengths, token)

    def end_of_run(self, token: ir.Value, last: ir.Value) -> ir.Value:
        """The first token behind `token` that is of another sequence, or padding where it is not."""
        b = self._b
        end = b.alloca_once(token.type, 8)
        b.store(b.plus(token, 1), end)
        row, is_live = self._read_int(self._rows, token), b.icmp_signed(">", self.length(token), b.int(0))

        def goes_on() -> ir.Value:
            at = b.load(end, typ=token.type)
            there = b.minimum(at, b.sub(last, b.int(1)))
            is_same = b.and_(
                b.icmp_signed("==", self._read_int(self._rows, there), row),
                b.icmp_signed("==", b.icmp_signed(">", self.length(there), b.int(0)), is_live),
            )
            return b.and_(b.icmp_signed("<", at, last), is_same)

        with b.while_(goes_on):
            b.store(b.plus(b.load(end, typ=token.type), 1), end)
        return b.load(end, typ=token.type)

    def clear(self, token: ir.Value, end: ir.Value) -> None:
        b = self._b
        with self._each_head(token, end) as (_, _, out, _):
            for part in range(self._parts):
                b.write(ir.Constant(f32x16, [0.0] * LANES), out, 64 * part)

    def attend(self, token: ir.Value, end: ir.Value) -> None:
        b = self._b
        table = b.at(self._tables, b.times(b.mul(self._read_int(self._rows, token), self._columns), 4))
        begin = b.sdiv(self._read_int(self._firsts, token), self._block)
        stop = b.plus(b.sdiv(b.sub(self.length(b.sub(end, b.int(1))), b.int(1)), self._block), 1)
        with b.loop(begin, stop) as index:
            keys = self._address(table, index, plane=0)
            with self._each_head(token, end) as (at, q, _, scores):
                with self._if_seen(at, index):
                    self._score(keys, q, scores, at, b.mul(index, self._block))
        with self._each_head(token, end) as (at, _, out, scores):
            self._weigh(scores, out, at)
        with b.loop(begin, stop) as index:
            values = self._address(table, index, plane=1)
            with self._each_head(token, end) as (at, _, out, scores):
                with self._if_seen(at, index):
                    self._sum(values, out, scores, at, b.mul(index, self._block))

    def _score(self, keys, q, scores, token, position) -> None:
        """Scores of one block's keys for one query head; those not seen become _MASKED."""
        b = self._b
        query = [b.read(q, 64 * part, f32x16) for part in range(self._parts)]
        lanes = ir.Constant(i32x16, list(range(LANES)))
        first, length = self._read_int(self._firsts, token), self.length(token)
        with b.loop(0, self._block, LANES) as at:
            line = b.at(keys, b.times(at, self._head_bytes))
            products = []
            for key in range(LANES):
                total = None
                for part, values in enumerate(query):
                    read = b.read(line, key * self._head_bytes + 64 * part, f32x16)
                    total = b.fmul(values, read) if total is None else _fma(b, values, read, total)
                products.append(total)
            here = b.add(broadcast(b, b.trunc(b.add(position, at), i32), i32x16), lanes)
            seen = b.and_(
                b.icmp_signed(">=", here, broadcast(b, b.trunc(first, i32), i32x16)),
                b.icmp_signed("<", here, broadcast(b, b.trunc(length, i32), i32x16)),
            )
            score = b.select(seen, _sum_each(b, products), ir.Constant(f32x16, [_MASKED] * LANES))
            b.write(score, scores, b.times(b.add(position, at), _FLOAT))

    def _weigh(self, scores, out, token) -> None:
        """Turns scores into softmax weights, and clears the sums of values."""
        b = self._b
        first = b.times(b.sdiv(self._read_int(self._firsts, token), b.int(LANES)), LANES)
        length = self.length(token)
        greatest = b.alloca_once(f32x16, 64)
        b.store(ir.Constant(f32x16, [_MASKED] * LANES), greatest)
        with b.loop(first, length, LANES) as at:
            before, score = b.load(greatest, typ=f32x16), b.read(scores, b.times(at, _FLOAT), f32x16)
            b.store(b.select(b.fcmp_ordered(">", score, before), score, before), greatest)
        most = broadcast(b, greatest_lane(b, b.load(greatest, typ=f32x16)), f32x16)
        total = b.alloca_once(f32x16, 64)
        b.store(ir.Constant(f32x16, [0.0] * LANES), total)
        with b.loop(first, length, LANES) as at:
            place = b.times(at, _FLOAT)
            weight = _exp(b, b.fsub(b.read(scores, place, f32x16), most))
            b.write(weight, scores, place)
            b.store(b.fadd(b.load(total, typ=f32x16), weight), total)
        share = b.fdiv(ir.Constant(f32, 1.0), sum_lanes(b, b.load(total, typ=f32x16)))
        shares = broadcast(b, share, f32x16)
        with b.loop(first, length, LANES) as at:
            place = b.times(at, _FLOAT)
            b.write(b.fmul(b.read(scores, place, f32x16), shares), scores, place)
        for part in range(self._parts):
            b.write(ir.Constant(f32x16, [0.0] * LANES), out, 64 * part)

    def _sum(self, values, out, scores, token, position) -> None:
        """Adds one block's weighted values to the output of one query head."""
        b = self._b
        low = b.select(b.icmp_signed(">", self._read_int(self._firsts, token), position),
                       b.sub(self._read_int(self._firsts, token), position), b.int(0))
        high = b.minimum(b.sub(self.length(token), position), self._block)
        weights = b.at(scores, b.times(position, _FLOAT))
        sums = [[b.alloca_once(f32x16, 64) for _ in range(self._parts)] for _ in range(2)]
        for part in range(self._parts):
            b.store(b.read(out, 64 * part, f32x16), sums[0][part])
            b.store(ir.Constant(f32x16, [0.0] * LANES), sums[1][part])

        def add(key: ir.Value, chain: int) -> None:
            weight = broadcast(b, b.read(weights, b.times(key, _FLOAT), f32), f32x16)
            for part, kept in enumerate(sums[chain]):
                value = b.read(values, b.plus(b.times(key, self._head_bytes), 64 * part), f32x16)
                b.store(_fma(b, weight, value, b.load(kept, typ=f32x16)), kept)

        rounds = b.add(low, b.times(b.sdiv(b.sub(high, low), b.int(_KEYS)), _KEYS))
        with b.loop(low, rounds, _KEYS) as key:
            for at in range(_KEYS):
                add(b.plus(key, at), at % 2)
        with b.loop(rounds, high) as key:
            add(key, 0)
        for part in range(self._parts):
            total = b.fadd(*(b.load(chain[part], typ=f32x16) for chain in sums))
            b.write(total, out, 64 * part)

    def _each_head(self, token: ir.Value, end: ir.Value):
        """Loops over tokens and the query heads of this kv head: (token, its q, its out, its scores)."""
        return _nested(self._b, token, end, self._group, lambda at, head: self._of_head(token, at, head))

    def _of_head(self, first: ir.Value, token: ir.Value, head: ir.Value) -> tuple:
        b = self._b
        index = b.add(b.mul(token, self._heads), b.add(b.mul(self._kv_head, self._group), head))
        place = b.times(index, self._head_bytes)
        scores = b.mul(b.add(b.mul(b.sub(token, first), self._group), head), self._keys)
        return token, b.at(self._q, place), b.at(self._out, place), b.at(self._scores, b.times(scores, _FLOAT))

    def _if_seen(self, token: ir.Value, index: ir.Value):
        """if the token sees a key of block `index` of its sequence."""
        b = self._b
        position = b.mul(index, self._block)
        return b.if_then(b.and_(
            b.icmp_signed("<", position, self.length(token)),
            b.icmp_signed(">", b.add(position, self._block), self._read_int(self._firsts, token)),
        ))

    def _address(self, table: ir.Value, index: ir.Value, plane: int) -> ir.Value:
        """Of the keys (plane 0) or values (1) of block `index`, with a block of another pool read as the dead one."""
        b = self._b
        block = b.sext(b.read(table, b.times(index, 4), i32), index.type)
        exists = b.icmp_unsigned("<", block, self._blocks)
        block = b.select(exists, block, b.int(0))
        layer = b.sext(b.read(self._layer, 0, i32), index.type)
        plane_of = b.plus(b.times(b.add(b.mul(b.add(b.mul(layer, self._blocks), block), self._kv_heads), self._kv_head), 2), plane)
        return b.at(self._pool, b.times(b.mul(plane_of, self._block), self._head_bytes))

    def _read_int(self, base: ir.Value, index: ir.Value) -> ir.Value:
        b = self._b
        return b.sext(b.read(base, b.times(index, 4), i32), index.type)


@contextmanager
def _nested(b: Emitter, start, stop, count, inner: Callable):
    with b.loop(start, stop) as outer_index, b.loop(0, count) as inner_index:
        yield inner(outer_index, inner_index)


def _fma(b: Emitter, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    return b.intrinsic("llvm.fma.v16f32", f32x16, [x, y, z])


def _sum_each(b: Emitter, vectors: list[ir.Value]) -> ir.Value:
    """Lane i of the result is the sum of the lanes of vector i: halves are added while pairs are merged."""
    distance = 1
    while len(vectors) > 1:
        low = [lane if not lane & distance else 16 + (lane ^ distance) for lane in range(LANES)]
        high = [lane | distance if not lane & distance else 16 + lane for lane in range(LANES)]
        vectors = [
            b.fadd(b.shuffle_vector(x, y, ir.Constant(i32x16, low)), b.shuffle_vector(x, y, ir.Constant(i32x16, high)))
            for x, y in zip(vectors[::2], vectors[1::2])
        ]
        distance *= 2
    return vectors[0]


def _exp(b: Emitter, x: ir.Value) -> ir.Value:
    """e ** x for x <= 0: 2 ** n times a polynomial on [-ln 2 / 2, ln 2 / 2] (Cephes' expf); 0 below -87."""
    constant = lambda value: ir.Constant(f32x16, [value] * LANES)
    lowest = constant(-87.0)
    is_tiny = b.fcmp_ordered("<", x, lowest)
    x = b.select(is_tiny, lowest, x)
    n = b.intrinsic("llvm.rint.v16f32", f32x16, [b.fmul(x, constant(1 / math.log(2)))])
    r = _fma(b, n, constant(-0.693359375), x)
    r = _fma(b, n, constant(2.12194440e-4), r)
    y = constant(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = _fma(b, y, r, constant(coefficient))
    y = b.fadd(_fma(b, b.fmul(r, r), y, r), constant(1.0))
    power = b.shl(b.add(b.fptosi(n, i32x16), b.splat(127)), b.splat(23))
    return b.select(is_tiny, constant(0.0), b.fmul(y, b.bitcast(power, f32x16)))
