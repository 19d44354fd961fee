"""Tile sizes of the GPU kernels and the shared memory they take, checked before the compiler sees them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.paged_attention.layout import PoolLayout

SHARED_BYTES = 227 * 1024
"""What a program may use on Hopper and Blackwell."""
BARRIER_BYTES = 1024
"""And logarithms of sums: at most."""
WIDE_TYPES = ("bfloat16", "float16")
"""Pools that the matrix unit reads as they are."""
NARROW_TYPES = {"int8": "bfloat16", "float8_e4m3fn": "float16", "float8_e5m2": "float16"}
"""Pools of 8 bits, and the type that a tile is widened to: each holds every value exactly, and has the quicker conversion."""


def compute_type(layout: PoolLayout) -> jnp.dtype:
    """The type that queries, softmax weights, and keys and values as the matrix unit sees them have."""
    return jnp.dtype(NARROW_TYPES.get(layout.dtype.name, layout.dtype))


def is_narrow(layout: PoolLayout) -> bool:
    return layout.dtype.itemsize == 1


@dataclass(frozen=True)
class GpuTiles:
    """The matrix instruction, and sizes chosen from the compiler's figures; none is tuned on hardware."""

    instruction: str = "wgmma"
    """wgmma (Hopper: results in registers) or tcgen05 (Blackwell: results in tensor memory, from where they are loaded)."""
    decode_keys: int = 64
    """Keys a decode program multiplies at a time."""
    decode_stages: int = 2
    """Tiles of keys and values in flight.  Two leave room for two programs a core at head_dim 128."""
    decode_programs: int = 4 * 132
    """Programs wanted, rows x kv heads x splits: a few for each core, so that few long rows fill the chip."""
    max_splits: int = 32
    min_split_keys: int = 256
    """A row is cut into pieces of at least this many keys."""
    decode_columns: int = 64
    """The output leaves in parts of this many lanes: a whole one would cost the room for a second program on the core."""
    chunk_warpgroups: int = 2
    """Of 64 query rows (token, head of the group) each, beside the one that fetches."""
    chunk_keys: int = 64
    chunk_stages: int = 2
    chunk_narrow_stages: int = 2
    """Tiles of an 8-bit pool in flight, before they are widened into one of `chunk_stages`."""
    chunk_columns: int = 128

    @property
    def strip_lanes(self) -> int:
        """The output is accumulated in strips of at most this many lanes, each a product of its own in tensor memory."""
        return 256 if self.instruction == "wgmma" else 64

    @property
    def output_columns(self) -> int:
        """The chunks' output leaves in parts of at most this many lanes."""
        return min(self.chunk_columns, self.strip_lanes)

    @property
    def swizzle_bytes(self) -> int:
        """tcgen05 of 64 rows reads its second operand in two halves of columns, which must be whole tiles."""
        return 128 if self.instruction == "wgmma" else 64

    def num_splits(self, num_rows: int, num_kv_heads: int, max_keys: int) -> int:
        """Pieces that a decode row is cut into: one where rows and heads fill the chip by themselves."""
        wanted = -(-self.decode_programs // (num_rows * num_kv_heads))
        return max(1, min(wanted, self.max_splits, max_keys // self.min_split_keys))

    def decode_shared_bytes(self, layout: PoolLayout) -> int:
        width, itemsize = layout.lanes, layout.dtype.itemsize
        fetched = 2 * self.decode_stages * self.decode_keys * width * itemsize
        widened = 2 * self.decode_keys * width if is_narrow(layout) else 0
        rows = 64 * (width * 2 + self.decode_keys * 2 + self.decode_columns * 4)
        return fetched + widened + rows + BARRIER_BYTES

    def chunk_shared_bytes(self, layout: PoolLayout) -> int:
        width, tile = layout.lanes, 2 * self.chunk_keys * layout.lanes
        fetched = self.chunk_narrow_stages * tile if is_narrow(layout) else 0
        queries_and_output = width + min(width, self.output_columns)
        weights = 0 if self.instruction == "wgmma" else self.chunk_keys
        rows = self.chunk_warpgroups * 64
        return fetched + 2 * self.chunk_stages * tile + rows * (queries_and_output + weights) * 2 + BARRIER_BYTES


DEFAULT_TILES = GpuTiles()


def default_tiles(layout: PoolLayout, instruction: str = "wgmma") -> GpuTiles:
    """Heads of 256 leave room for one decode program a core, and for the chunks' output in parts only."""
    if layout.lanes > 128:
        warpgroups = 1 if is_narrow(layout) else 2
        sizes = {"decode_columns": 32, "chunk_warpgroups": warpgroups, "chunk_narrow_stages": 1, "chunk_columns": 64}
        return GpuTiles(instruction, **sizes)
    return GpuTiles(instruction)


def blocks_per_tile(num_keys: int, block_size: int) -> int:
    """Blocks that a tile of keys is fetched from; a larger block is fetched in several tiles."""
    return max(1, num_keys // block_size)


def fits_tiles(num_keys: int, block_size: int) -> bool:
    return block_size % 8 == 0 and math.gcd(num_keys, block_size) == min(num_keys, block_size)
