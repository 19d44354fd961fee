"""Small additions to llvmlite's IR builder: loops, 16-lane float vectors, addresses.

The CPU kernels are written as LLVM IR, because it is the one way to SIMD registers and matrix tiles that needs no C
compiler on the user's machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llvmlite import ir
from llvmlite.ir import instructions

LANES = 16
i1, i8, i16, i32, i64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
f32 = ir.FloatType()
ptr = ir.PointerType()
f32x16, i32x16, i16x32 = ir.VectorType(f32, LANES), ir.VectorType(i32, LANES), ir.VectorType(i16, 2 * LANES)


class Emitter(ir.IRBuilder):
    """An IRBuilder whose integers are i64 and whose addresses are bytes."""

    def int(self, value: int | ir.Value) -> ir.Value:
        return ir.Constant(i64, value) if isinstance(value, int) else value

    def plus(self, *values: int | ir.Value) -> ir.Value:
        total = self.int(values[0])
        for value in values[1:]:
            total = self.add(total, self.int(value))
        return total

    def times(self, a: int | ir.Value, b: int | ir.Value) -> ir.Value:
        return self.mul(self.int(a), self.int(b))

    def minimum(self, a: ir.Value, b: int | ir.Value) -> ir.Value:
        return self.select(self.icmp_signed("<", a, self.int(b)), a, self.int(b))

    def maximum(self, a: ir.Value, b: int | ir.Value) -> ir.Value:
        return self.select(self.icmp_signed(">", a, self.int(b)), a, self.int(b))

    def at(self, base: ir.Value, offset: int | ir.Value) -> ir.Value:
        """The address `offset` bytes behind `base`."""
        return self.gep(self.untyped(base), [self.int(offset)], source_etype=i8)

    def untyped(self, address: ir.Value) -> ir.Value:
        """llvmlite gives stack memory and functions pointers with a type, which LLVM itself no longer has."""
        if address.type.is_opaque:
            return address
        cast = instructions.CastInstr(self.block, "bitcast", address, ptr)  # builder.bitcast holds the types for equal
        self._insert(cast)
        return cast

    def read(self, base: ir.Value, offset: int | ir.Value, kind: ir.Type, align: int | None = None) -> ir.Value:
        return self.load(self.at(base, offset), typ=kind, align=align or 4)

    def write(self, value: ir.Value, base: ir.Value, offset: int | ir.Value, align: int | None = None) -> None:
        self.store(value, self.at(base, offset), align=align or 4)

    @contextmanager
    def loop(self, start: int | ir.Value, stop: int | ir.Value, step: int = 1) -> Iterator[ir.Value]:
        """for i in range(start, stop, step)."""
        start, stop = self.int(start), self.int(stop)
        before = self.block
        head, body, end = (self.append_basic_block(name) for name in ("loop", "body", "end"))
        self.branch(head)
        self.position_at_end(head)
        index = self.phi(i64)
        index.add_incoming(start, before)
        self.cbranch(self.icmp_signed("<", index, stop), body, end)
        self.position_at_end(body)
        yield index
        index.add_incoming(self.add(index, self.int(step)), self.block)
        self.branch(head)
        self.position_at_end(end)

    @contextmanager
    def while_(self, condition: Callable[[], ir.Value]) -> Iterator[None]:
        """while condition(): the condition is emitted once, and evaluated before each round."""
        head, body, end = (self.append_basic_block(name) for name in ("while", "body", "end"))
        self.branch(head)
        self.position_at_end(head)
        self.cbranch(condition(), body, end)
        self.position_at_end(body)
        yield
        self.branch(head)
        self.position_at_end(end)

    def wait_while(self, condition: Callable[[], ir.Value]) -> None:
        """Spins; for moments only."""
        with self.while_(condition):
            self.intrinsic("llvm.x86.sse2.pause", ir.VoidType(), [])

    def alloca_once(self, kind: ir.Type, align: int) -> ir.Value:
        """Stack memory of the function, wherever this is emitted: in a loop, an alloca would take more each round."""
        with self.goto_entry_block():
            made = self.alloca(kind)
        made.align = align
        return made

    def is_set(self, address: ir.Value) -> ir.Value:
        return self.icmp_unsigned("!=", self.ptrtoint(address, i64), self.int(0))

    def atomic_read(self, base: ir.Value, offset: int) -> ir.Value:
        return self.load_atomic(self.at(base, offset), "acquire", 8, typ=i64)

    def atomic_add(self, base: ir.Value, offset: int) -> ir.Value:
        """Adds one; the value before."""
        return self.atomic_rmw("add", self.at(base, offset), self.int(1), "acq_rel")

    def splat(self, bits: int) -> ir.Value:
        return ir.Constant(i32x16, [bits] * LANES)

    def intrinsic(self, name: str, result: ir.Type, arguments: list[ir.Value]) -> ir.Value:
        function = self.module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(result, [argument.type for argument in arguments])
            function = ir.Function(self.module, kind, name)
        return self.call(function, arguments)


def broadcast(b: Emitter, value: ir.Value, kind: ir.VectorType) -> ir.Value:
    """`value` in every lane."""
    nothing = ir.Constant(kind, ir.Undefined)
    first = b.insert_element(nothing, value, ir.Constant(i32, 0))
    return b.shuffle_vector(first, nothing, ir.Constant(i32x16, [0] * LANES))


def fma(b: Emitter, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """x * y + z of 16 floats, rounded once."""
    return b.intrinsic("llvm.fma.v16f32", f32x16, [x, y, z])


def sum_lanes(b: Emitter, vector: ir.Value) -> ir.Value:
    return _fold(b, vector, b.fadd)


def greatest_lane(b: Emitter, vector: ir.Value) -> ir.Value:
    return _fold(b, vector, lambda x, y: b.select(b.fcmp_ordered(">", y, x), y, x))


def _fold(b: Emitter, vector: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    for distance in (8, 4, 2, 1):
        other = b.shuffle_vector(vector, vector, ir.Constant(i32x16, [lane ^ distance for lane in range(LANES)]))
        vector = combine(vector, other)
    return b.extract_element(vector, ir.Constant(i32, 0))


def function(module: ir.Module, name: str, result: ir.Type, arguments: list[ir.Type]) -> tuple[ir.Function, Emitter]:
    made = ir.Function(module, ir.FunctionType(result, arguments), name)
    return made, Emitter(made.append_basic_block("entry"))
