"""Tile sizes of the TPU kernels, and what they cost in VMEM and SMEM: checked here, with numbers, before a compiler
sees them.

The defaults fit every generation from v4 on.  Nothing here was timed: they come from the compilers' schedules
(docs/kernels-tpu.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pallas_kernels.paged_attention.layout import PoolLayout

SMEM_BYTES = 1 << 20
"""Scalar memory of every generation from v4 to tpu7x (compilers' own limit)."""
SMEM_RESERVED_BYTES = 4 << 10
"""What the compiler needs of it besides our tables: a table of 261,628 of 262,144 words was the largest it took."""
VMEM_BYTES = 32 << 20
"""The smallest vector memory among the targets (v4); v5e and v6e have 128 MiB, tpu7x 64 MiB."""
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


def default_tiles(layout: PoolLayout, queries_per_kv_head: int = 1) -> TpuTiles:
    """Groups of about 4 MiB for decode and 1 MiB for chunks, at most 2,048 tokens, whole blocks and whole 128-lane
    columns.

    `queries_per_kv_head` matters to decode only: a group's logits, of all heads, are to stay in 32 vector registers.
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
    return TpuTiles(
        decode_group=decode_group,
        decode_tail=decode_tail,
        heads_per_matmul=heads_per_matmul,
        query_tile=128 if layout.num_kv_heads <= 2 else 64,
        chunk_group=tokens(1 << 20, key_tile),
        key_tile=key_tile,
    )


def padded_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Bytes of an array in VMEM, where rows come in 8 (by 32-bit words) and lanes in 128."""
    *leading, rows, lanes = shape
    row_tile = 8 * max(1, 4 // itemsize)
    total = -(-rows // row_tile) * row_tile * (-(-lanes // 128) * 128) * itemsize
    for size in leading:
        total *= size
    return total


def check_vmem(kernel: str, needed: int, **sizes: int) -> int:
    """The limit to compile with, if `needed` bytes fit; else NotImplementedError with the sizes that made it so."""
    limit = max(16 << 20, needed * 5 // 4)  # the compiler adds temporaries of its own
    if limit > VMEM_BYTES:
        described = ", ".join(f"{name}={value}" for name, value in sizes.items())
        raise NotImplementedError(
            f"{kernel}: {needed / 2**20:.1f} MiB of VMEM and a quarter for temporaries, "
            f"of {VMEM_BYTES >> 20} MiB ({described})"
        )
    return limit


def check_smem(kernel: str, prefetched_words: int, max_blocks: int) -> None:
    """Scalars of the whole call, and two table rows (this sequence's and the next one's), each double-buffered."""
    needed = 4 * (prefetched_words + 4 * max_blocks)
    if needed > SMEM_BYTES - SMEM_RESERVED_BYTES:
        raise NotImplementedError(
            f"{kernel}: {needed / KIB:.1f} KiB of SMEM, of {(SMEM_BYTES - SMEM_RESERVED_BYTES) // KIB} KiB: "
            f"{prefetched_words} words of step geometry and 4 x {max_blocks} table entries; "
            "use larger blocks, a shorter context, or fewer tokens a step"
        )
