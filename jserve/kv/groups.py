"""Layer groups: layers that need the same cache share one pool and one block table.

Full attention keeps every block; a sliding window keeps only the blocks its next query can see. Pure arithmetic on
block counts, no state: the block manager asks here how far back a group has to look.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class GroupSpec:
    """What one layer group keeps of a sequence."""

    window: int | None = None
    """Sliding window in tokens (a query sees itself and window - 1 before it); None: full attention."""

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}, expected at least 1 token (or None for full attention)")

    def num_blocks_seen(self, block_size: int) -> int | None:
        """Blocks before a block border that a query right behind the border can see; None: all of them."""
        return None if self.window is None else -(-(self.window - 1) // block_size)

    def num_blocks_behind(self, num_computed, block_size: int):
        """Leading blocks that no query at position num_computed or later can see (an int, or an array of them)."""
        if self.window is None:
            return num_computed * 0
        return np.maximum(num_computed - self.window + 1, 0) // block_size

    def num_blocks_held(self, step_tokens: int | None, block_size: int) -> int | None:
        """Most blocks that a sequence holds at once when it grows by step_tokens; None: all of its blocks."""
        if self.window is None or step_tokens is None:
            return None
        return -(-(self.window - 1 + step_tokens) // block_size) + 1


def combined_hit(cached: np.ndarray, groups: tuple[GroupSpec, ...], block_size: int) -> int:
    """The longest prefix, in blocks, that every group can take from the cache.

    cached: bool[groups, blocks], which blocks of the prefix each group still holds. Full attention needs all blocks
    of the prefix, a window of W tokens its last ceil((W - 1) / block_size): with a window of 8 and blocks of 4,
    a window group that holds [1 1 0 1 1] allows 5 (the last two are there), and 2, but not 3 or 4.
    """
    num_blocks = cached.shape[1]
    if num_blocks == 0:
        return 0
    possible = np.ones(num_blocks + 1, bool)  # possible[n]: a prefix of n blocks
    lengths = np.arange(1, num_blocks + 1)
    for held, group in zip(cached, groups):
        last_gap = np.maximum.accumulate(np.where(held, 0, lengths))  # 1-based place of the last missing block
        seen = group.num_blocks_seen(block_size)
        needed = lengths if seen is None else np.minimum(lengths, seen)
        possible[1:] &= lengths - last_gap >= needed
    return int(np.flatnonzero(possible)[-1])
