"""What a sampler asks of every row of logits, in one pass and a half: the maximum, the sum of exponentials, the best token.

A row is one chunk of work, so that rows are shared among threads and a row's result does not depend on its batch.
"""

from __future__ import annotations

from llvmlite import ir

from pallas_kernels.cpu.elementwise import exp
from pallas_kernels.cpu.emit import LANES, Emitter, broadcast, f32, f32x16, greatest_lane, i32, i32x16, sum_lanes
from pallas_kernels.cpu.ffi_handler import add_handler, data, dim

_CHAINS = 4
"""Sums that do not wait for each other."""
_VECTOR = 4 * LANES
_LOWEST = float("-inf")


def add_scan_rows(module: ir.Module, name: str, num_slots: int) -> None:
    """The handler of (logits f32[R, V], shaped f32[R, V], used i32[R]) -> (maximum f32[R], mass f32[R], best f32[R],
    best_id i32[R]).

    maximum is of logits, mass the sum of exp(logits - maximum), which is no number where a logit is NaN or infinite; best is
    the maximum of shaped and best_id its lowest id.  V is a multiple of 64.  Rows that are not used get 0, 1, 0, 0.
    """

    def plan(b: Emitter, args: list[ir.Value], rets: list[ir.Value]):
        rows, width = dim(b, args[0], 0), dim(b, args[0], 1)
        return [*(data(b, buffer) for buffer in (*args, *rets)), width], rows, b.int(0)

    def chunk(b: Emitter, values: list[ir.Value], row: ir.Value, slot: ir.Value, job: ir.Value) -> None:
        logits, shaped, used, maximum, mass, best, best_id, width = values
        place, size = b.times(row, 4), b.times(width, 4)
        own = [b.at(base, b.mul(row, size)) for base in (logits, shaped)]
        is_used = b.icmp_signed("!=", b.read(used, place, i32), ir.Constant(i32, 0))
        with b.if_else(is_used) as (live, padding):
            with live:
                _scan(b, *own, size, [b.at(base, place) for base in (maximum, mass, best, best_id)])
            with padding:
                for base, nothing in ((maximum, 0.0), (mass, 1.0), (best, 0.0)):
                    b.write(ir.Constant(f32, nothing), base, place)
                b.write(ir.Constant(i32, 0), best_id, place)

    add_handler(module, name, 3, 4, plan, chunk, num_slots)


def _scan(b: Emitter, logits: ir.Value, shaped: ir.Value, size: ir.Value, outs: list[ir.Value]) -> None:
    lowest, nothing = ir.Constant(f32x16, [_LOWEST] * LANES), ir.Constant(f32x16, [0.0] * LANES)
    keep = lambda value: _kept(b, value)
    greatest, best, sums = ([keep(value) for _ in range(_CHAINS)] for value in (lowest, lowest, nothing))
    ids = [keep(ir.Constant(i32x16, list(range(LANES * chain, LANES * (chain + 1))))) for chain in range(_CHAINS)]
    here = [keep(ir.Constant(i32x16, list(range(LANES * chain, LANES * (chain + 1))))) for chain in range(_CHAINS)]
    with b.loop(0, size, _CHAINS * _VECTOR) as at:
        for chain in range(_CHAINS):
            offset = b.plus(at, chain * _VECTOR)
            value, before = b.read(logits, offset, f32x16), b.load(greatest[chain], typ=f32x16)
            b.store(b.select(b.fcmp_ordered(">", value, before), value, before), greatest[chain])
            value, before = b.read(shaped, offset, f32x16), b.load(best[chain], typ=f32x16)
            is_better, id_here = b.fcmp_ordered(">", value, before), b.load(here[chain], typ=i32x16)
            b.store(b.select(is_better, value, before), best[chain])
            b.store(b.select(is_better, id_here, b.load(ids[chain], typ=i32x16)), ids[chain])
            b.store(b.add(id_here, b.splat(_CHAINS * LANES)), here[chain])
    maximum = _greatest(b, greatest)
    everywhere = broadcast(b, maximum, f32x16)
    with b.loop(0, size, _CHAINS * _VECTOR) as at:
        for chain in range(_CHAINS):
            value = b.read(logits, b.plus(at, chain * _VECTOR), f32x16)
            weight = exp(b, b.fsub(value, everywhere))
            b.store(b.fadd(b.load(sums[chain], typ=f32x16), weight), sums[chain])
    total = _tree(b, [b.load(one, typ=f32x16) for one in sums], b.fadd)
    most = _greatest(b, best)
    b.write(maximum, outs[0], 0)
    b.write(sum_lanes(b, total), outs[1], 0)
    b.write(most, outs[2], 0)
    b.write(_lowest_id(b, best, ids, most), outs[3], 0)


def _kept(b: Emitter, value: ir.Value) -> ir.Value:
    made = b.alloca_once(value.type, 64)
    b.store(value, made)
    return made


def _greatest(b: Emitter, kept: list[ir.Value]) -> ir.Value:
    vectors = [b.load(one, typ=f32x16) for one in kept]
    return greatest_lane(b, _tree(b, vectors, lambda x, y: b.select(b.fcmp_ordered(">", y, x), y, x)))


def _tree(b: Emitter, vectors: list[ir.Value], combine) -> ir.Value:
    while len(vectors) > 1:
        vectors = [combine(x, y) for x, y in zip(vectors[::2], vectors[1::2])]
    return vectors[0]


def _lowest_id(b: Emitter, best: list[ir.Value], ids: list[ir.Value], most: ir.Value) -> ir.Value:
    """Each lane has the lowest id of its own maximum; of the lanes that have `most`, the lowest."""
    everywhere, none = broadcast(b, most, f32x16), b.splat(0x7FFFFFFF)
    smaller = lambda x, y: b.select(b.icmp_signed("<", y, x), y, x)
    candidates = [
        b.select(b.fcmp_ordered("==", b.load(value, typ=f32x16), everywhere), b.load(its_id, typ=i32x16), none)
        for value, its_id in zip(best, ids)
    ]
    vector = _tree(b, candidates, smaller)
    for distance in (8, 4, 2, 1):
        lanes = ir.Constant(i32x16, [lane ^ distance for lane in range(LANES)])
        vector = smaller(vector, b.shuffle_vector(vector, vector, lanes))
    return b.extract_element(vector, ir.Constant(i32, 0))
