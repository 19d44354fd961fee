"""Matrix tiles (AMX) as IR: eight registers of 16 rows of 64 bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from llvmlite import ir

from pallas_kernels.cpu.emit import Emitter, i8, i32, i32x16

TILE_ROWS, TILE_BYTES = 16, 1024


@contextmanager
def configured(b: Emitter, name: str) -> Iterator[None]:
    """Tiles may be used within; `name` is the kernel's."""
    label = f"{name}_tiles"
    config = b.module.globals.get(label)
    if config is None:
        config = ir.GlobalVariable(b.module, ir.ArrayType(i8, 64), label)
        config.initializer = ir.Constant(config.value_type, _config())
        config.global_constant, config.align = True, 64
    b.intrinsic("llvm.x86.ldtilecfg", ir.VoidType(), [b.untyped(config)])
    yield
    b.intrinsic("llvm.x86.tilerelease", ir.VoidType(), [])


def _config() -> bytearray:
    """Palette 1: eight tiles of 16 rows of 64 bytes."""
    config = bytearray(64)
    config[0] = 1
    for number in range(8):
        config[16 + 2 * number], config[48 + number] = 64, TILE_ROWS
    return config


def tile(b: Emitter, name: str, *numbers: int) -> None:
    """An operation on tiles by number: tilezero(t), or a product such as tdpbf16ps(sum, a, b)."""
    b.intrinsic(f"llvm.x86.{name}", ir.VoidType(), [ir.Constant(i8, number) for number in numbers])


def load_tile(b: Emitter, number: int, base: ir.Value, offset: int | ir.Value, stride: int | ir.Value = 64) -> None:
    b.intrinsic("llvm.x86.tileloadd64", ir.VoidType(), [ir.Constant(i8, number), b.at(base, offset), b.int(stride)])


def store_tile(b: Emitter, number: int, base: ir.Value, offset: int | ir.Value) -> None:
    b.intrinsic("llvm.x86.tilestored64", ir.VoidType(), [ir.Constant(i8, number), b.at(base, offset), b.int(64)])


def prefetch(b: Emitter, address: ir.Value, for_write: bool = False) -> None:
    flags = [ir.Constant(i32, flag) for flag in (int(for_write), 3 if for_write else 2, 1)]
    b.intrinsic("llvm.prefetch.p0", ir.VoidType(), [address, *flags])


def transposed(b: Emitter, rows: Sequence[ir.Value]) -> list[ir.Value]:
    """16 vectors of 16: exchanges halves, quarters, ... of pairs of rows."""
    rows = list(rows)
    for distance in (1, 2, 4, 8):
        upper = [lane | distance if not lane & distance else 16 + lane for lane in range(16)]
        lower = [lane if not lane & distance else 16 + (lane ^ distance) for lane in range(16)]
        for at in (at for at in range(16) if not at & distance):
            pair = rows[at], rows[at | distance]
            rows[at] = b.shuffle_vector(*pair, ir.Constant(i32x16, lower))
            rows[at | distance] = b.shuffle_vector(*pair, ir.Constant(i32x16, upper))
    return rows
