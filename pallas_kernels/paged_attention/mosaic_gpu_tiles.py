"""Tile sizes of the GPU kernels and the shared memory they take, checked before the compiler sees them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pallas_kernels.paged_attention.layout import PoolLayout

SHARED_BYTES = 227 * 1024
"""What a program may use on Hopper and Blackwell."""


@dataclass(frozen=True)
class GpuTiles:
    """Sizes chosen from the compiler's figures; none is tuned on hardware."""

    decode_keys: int = 64
    """Keys a decode program multiplies at a time."""
    decode_stages: int = 2
    """Tiles of keys and values in flight.  Two leave room for two programs a core at head_dim 128."""
    decode_programs: int = 4 * 132
    """Programs wanted, rows x kv heads x splits: a few for each core, so that few long rows fill the chip."""
    max_splits: int = 32
    min_split_keys: int = 256
    """A row is cut into pieces of at least this many keys."""
    chunk_warpgroups: int = 2
    """Of 64 query rows (token, head of the group) each, beside the one that fetches."""
    chunk_keys: int = 64
    chunk_stages: int = 2

    def num_splits(self, num_rows: int, num_kv_heads: int, max_keys: int) -> int:
        """Pieces that a decode row is cut into: one where rows and heads fill the chip by themselves."""
        wanted = -(-self.decode_programs // (num_rows * num_kv_heads))
        return max(1, min(wanted, self.max_splits, max_keys // self.min_split_keys))

    def decode_shared_bytes(self, layout: PoolLayout) -> int:
        width, itemsize = layout.lanes, layout.dtype.itemsize
        fetched = 2 * self.decode_stages * self.decode_keys * width * itemsize
        return fetched + 64 * width * 2 + 64 * self.decode_keys * 2 + 64 * 64 * 4

    def chunk_shared_bytes(self, layout: PoolLayout) -> int:
        width, itemsize = layout.lanes, layout.dtype.itemsize
        return 2 * self.chunk_stages * self.chunk_keys * width * itemsize + 2 * self.chunk_warpgroups * 64 * width * 2


DEFAULT_TILES = GpuTiles()


def blocks_per_tile(num_keys: int, block_size: int) -> int:
    """Blocks that a tile of keys is fetched from; a larger block is fetched in several tiles."""
    return max(1, num_keys // block_size)


def fits_tiles(num_keys: int, block_size: int) -> bool:
    return block_size % 8 == 0 and math.gcd(num_keys, block_size) == min(num_keys, block_size)
