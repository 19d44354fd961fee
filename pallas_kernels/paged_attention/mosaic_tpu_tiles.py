"""Tile sizes of the TPU kernels, and what they cost in VMEM and SMEM: checked here, with numbers, before a compiler
sees them.

The defaults shrink until they fit the generation that is compiled for.  Nothing here was timed: they come from the
compilers' schedules (docs/kernels-tpu.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from pallas_kernels.paged_attention.layout import PoolLayout
from pallas_kernels.paged_attention.tuned import device_kind

SMEM_BYTES = 1 << 20
"""Scalar memory of every generation from v4 to tpu7x (compilers' own limit)."""
SMEM_RESERVED_BYTES = 4 << 10
"""What the compiler needs of it besides our tables: a table of 261,628 of 262,144 words was the largest it took."""
MIB = 1 << 20
VMEM_BYTES = {
    "TPU v4": 16 * MIB,
    "TPU v5 lite": 128 * MIB,
    "TPU v5": 64 * MIB,
    "TPU v5p": 64 * MIB,
    "TPU v6 lite": 128 * MIB,
    "TPU7x": 64 * MIB,
}
"""Vector memory of a core by device kind."""
UNKNOWN_VMEM_BYTES = 32 * MIB
"""Taken of a device that is not listed."""
LANES = 128
KIB = 1 << 10


@dataclass(frozen=True)
class TpuTiles:
    """How the kernels cut their work.  All sizes in tokens, except `heads_per_matmul`."""

    decode_group: int
    """KV tokens fetched and attended at once by the decode kernel; two such groups are in VMEM."""
    decode_tail: int
    """Masked KV tokens attended at once, at a row's end; divides `decode_group`."""
    heads_per_matmul: int
    """kv heads side by side in one decode matmul, with a block-diagonal q: 2 fills a 256-wide MXU."""
    query_tile: int
    """Flat tokens of a query tile of the chunk kernel."""
    chunk_group: int
    """KV tokens fetched at once by the chunk kernel; two such groups are in VMEM."""
    key_tile: int
    """KV tokens attended at once by the chunk kernel; divides `chunk_group`."""

    def unit_heads(self, queries_per_kv_head: int) -> int:
        """Query heads of one kv head that share a matmul of the chunk kernel: about 256 rows for each time the keys are
        pushed."""
        wanted = max(1, 256 // self.query_tile)
        return max(count for count in range(1, wanted + 1) if queries_per_kv_head % count == 0)


def default_tiles(layout: PoolLayout, queries_per_kv_head: int = 1, query_itemsize: int = 2) -> TpuTiles:
    """Groups of about 4 MiB for decode and 1 MiB for chunks, at most 2,048 tokens, whole blocks and whole 128-lane
    columns; smaller ones where they do not fit.

    A decode group's logits, of all heads, are to stay in 32 vector registers.  `query_tile` follows from the layout and
    the device alone: a step's geometry is prepared without knowing the query heads.
    """
    bytes_per_token = layout.num_kv_heads * layout.planes * layout.lanes * layout.dtype.itemsize

    def tokens(target_bytes: int, unit: int) -> int:
        return max(unit, min(2048, target_bytes // bytes_per_token) // unit * unit)

    column = math.lcm(layout.block_size, LANES)
    key_tile = max(column, 512 // column * column)
    decode_tail = max(column, 256 // column * column)
    decode_group = tokens(4 << 20, decode_tail)
    heads_per_matmul = 2 if layout.num_kv_heads % 2 == 0 and layout.head_dim <= 128 else 1
    row_registers = layout.num_kv_heads // heads_per_matmul * -(-heads_per_matmul * queries_per_kv_head // 8)
    while row_registers * decode_group // LANES > 32 and decode_group % (2 * decode_tail) == 0:
        decode_group //= 2
    query_tile = 128 if layout.num_kv_heads <= 2 else 64
    if vmem_bytes() < UNKNOWN_VMEM_BYTES:
        query_tile = 32 if layout.dtype.itemsize == 4 else 64
    tiles = TpuTiles(
        decode_group=decode_group,
        decode_tail=decode_tail,
        heads_per_matmul=heads_per_matmul,
        query_tile=query_tile,
        chunk_group=tokens(1 << 20, key_tile),
        key_tile=key_tile,
    )
    for size, part, bytes_of in (
        ("decode_group", "decode_tail", decode_vmem_bytes),
        ("chunk_group", "key_tile", chunk_vmem_bytes),
    ):
        needed = lambda tiles: bytes_of(layout, tiles, queries_per_kv_head, query_itemsize)
        tiles = _shrunk(tiles, size, part, column, needed)
    return tiles


def _shrunk(tiles: TpuTiles, size: str, part: str, column: int, needed: Callable[[TpuTiles], int]) -> TpuTiles:
    """With a smaller group, then with smaller parts of it, until what it needs fits; the smallest where nothing does."""
    while not fits_vmem(needed(tiles)):
        group, unit = getattr(tiles, size), getattr(tiles, part)
        if group > unit:
            tiles = replace(tiles, **{size: max(unit, group // 2 // unit * unit)})
        elif unit > column:
            smaller = max(column, unit // 2 // column * column)
            tiles = replace(tiles, **{size: smaller, part: smaller})
        else:
            break
    return tiles


def decode_vmem_bytes(layout: PoolLayout, tiles: TpuTiles, queries_per_kv_head: int, query_itemsize: int) -> int:
    """What a call of the decode kernel keeps in VMEM."""
    pairs, rows = layout.num_kv_heads // tiles.heads_per_matmul, tiles.heads_per_matmul * queries_per_kv_head
    lanes, blocks = head_lanes(layout), tiles.decode_group // layout.block_size
    buffer_shape = (2, blocks, layout.num_kv_heads, layout.planes, layout.block_size, LANES)
    return (
        padded_bytes(buffer_shape, layout.dtype.itemsize)
        + 2 * padded_bytes((pairs, rows, tiles.heads_per_matmul * lanes), query_itemsize)
        + 2 * padded_bytes((pairs, rows, lanes), query_itemsize)
        + 2 * padded_bytes((layout.num_kv_heads, layout.planes, LANES), layout.dtype.itemsize)
        + 3 * padded_bytes((pairs, rows, LANES), 4)  # peak, mass, and sinks where there are any
        + padded_bytes((pairs, rows, lanes), 4)
        + 2 * padded_bytes((pairs, rows, tiles.decode_group), 4)  # logits and weights, beyond the registers
    )


def chunk_vmem_bytes(layout: PoolLayout, tiles: TpuTiles, queries_per_kv_head: int, query_itemsize: int) -> int:
    """What a call of the chunk kernel keeps in VMEM."""
    unit_heads = tiles.unit_heads(queries_per_kv_head)
    num_heads = layout.num_kv_heads * queries_per_kv_head
    units, rows = num_heads // unit_heads, unit_heads * tiles.query_tile
    lanes, blocks = head_lanes(layout), tiles.chunk_group // layout.block_size
    buffer_shape = (2, blocks, layout.num_kv_heads, layout.planes, layout.block_size, LANES)
    a_stage = (
        padded_bytes((rows, tiles.key_tile), 4)
        + padded_bytes((rows, tiles.key_tile), query_itemsize)
        + 2 * padded_bytes((rows, LANES), 4)
    )
    return (
        padded_bytes(buffer_shape, layout.dtype.itemsize)
        + 2 * padded_bytes((units, rows, LANES), 4)
        + padded_bytes((units, rows, lanes), 4)
        + 2 * a_stage
        + 4 * padded_bytes((num_heads, tiles.query_tile, lanes), query_itemsize)
    )


def head_lanes(layout: PoolLayout) -> int:
    """Lanes of one head's query and output."""
    return LANES * max(1, layout.planes // 2)


def padded_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Bytes of an array in VMEM, where rows come in 8 (by 32-bit words) and lanes in 128."""
    *leading, rows, lanes = shape
    row_tile = 8 * max(1, 4 // itemsize)
    total = -(-rows // row_tile) * row_tile * (-(-lanes // 128) * 128) * itemsize
    for size in leading:
        total *= size
    return total


def vmem_bytes() -> int:
    """Of a core of the device that is compiled for."""
    return VMEM_BYTES.get(device_kind("tpu") or "", UNKNOWN_VMEM_BYTES)


def fits_vmem(needed: int) -> bool:
    """With a sixteenth for what the compiler adds: it was seen to add a tenth of a MiB."""
    return needed + needed // 16 <= vmem_bytes()


def check_vmem(kernel: str, needed: int, **sizes: int) -> int:
    """The limit to compile with, if `needed` bytes fit; else NotImplementedError with the sizes that made it so."""
    if not fits_vmem(needed):
        described = ", ".join(f"{name}={value}" for name, value in sizes.items())
        raise NotImplementedError(
            f"{kernel}: {needed / MIB:.1f} MiB of VMEM and a sixteenth for temporaries, "
            f"of {vmem_bytes() // MIB} MiB on {device_kind('tpu') or 'an unknown TPU'} ({described})"
        )
    return min(vmem_bytes(), max(16 * MIB, needed * 5 // 4))


def check_smem(kernel: str, prefetched_words: int, max_blocks: int) -> None:
    """Scalars of the whole call, and two table rows (this sequence's and the next one's), each double-buffered."""
    needed = 4 * (prefetched_words + 4 * max_blocks)
    if needed > SMEM_BYTES - SMEM_RESERVED_BYTES:
        raise NotImplementedError(
            f"{kernel}: {needed / KIB:.1f} KiB of SMEM, of {(SMEM_BYTES - SMEM_RESERVED_BYTES) // KIB} KiB: "
            f"{prefetched_words} words of step geometry and 4 x {max_blocks} table entries; "
            "use larger blocks, a shorter context, or fewer tokens a step"
        )
