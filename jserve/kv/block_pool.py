"""The blocks of one layer group: who owns how many references, and which block goes next.

Knows ids and counts only: no tokens, no sequences, no device memory. Many blocks at once are one numpy call; only
blocks that leave or enter the cached state cost Python work, each O(1).
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

DEAD_BLOCK = 0
"""Padding writes go here; unused table entries point here. Never allocated, never owned."""


class BlockPool:
    """Invariant: each block but the dead one is exactly one of
    used (num_owners > 0), cached (no owner, but findable: in LRU order) or free (on the stack, not findable)."""

    def __init__(self, num_blocks: int):
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}, expected at least 2: the dead block and one to use")
        self.num_blocks = num_blocks
        self.num_owners = np.zeros(num_blocks, np.int32)
        self.findable = np.zeros(num_blocks, bool)
        self._free = np.arange(num_blocks - 1, DEAD_BLOCK, -1, dtype=np.int32)  # a stack; its top is the end
        self._num_free = num_blocks - 1
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return self._num_free

    @property
    def num_cached(self) -> int:
        """Blocks that nobody owns but the prefix cache still finds."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that allocate can hand out."""
        return self._num_free + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_available

    def allocate(self, count: int) -> tuple[np.ndarray, list[int]]:
        """`count` blocks with one owner each, and those of them that were cached until now (the caller forgets them).

        Free blocks go first, then the least recently used cached ones. The caller has checked num_available.
        """
        num_from_free = min(count, self._num_free)
        top = self._num_free
        blocks = self._free[top - num_from_free : top][::-1]
        self._num_free = top - num_from_free
        evicted = [self._cached.popitem(last=False)[0] for _ in range(count - num_from_free)]
        if evicted:
            self.findable[evicted] = False
            blocks = np.concatenate([blocks, np.array(evicted, np.int32)])
        else:
            blocks = blocks.copy()
        self.num_owners[blocks] = 1
        return blocks, evicted

    def share(self, blocks: np.ndarray) -> None:
        """One more owner for each of `blocks` (distinct, used or cached)."""
        for block in blocks[self.num_owners[blocks] == 0].tolist():
            del self._cached[block]
        self.num_owners[blocks] += 1

    def release(self, blocks: np.ndarray) -> np.ndarray:
        """One owner less for each of `blocks`; a block given twice loses two.

        Blocks without an owner become cached, in the order given (the first is reused first), where they are findable,
        and free otherwise; the freed ones are returned.
        """
        np.subtract.at(self.num_owners, blocks, 1)
        unowned = blocks[self.num_owners[blocks] == 0]
        findable = self.findable[unowned]
        if findable.any():
            self._cached.update(dict.fromkeys(unowned[findable].tolist()))
        freed = unowned[~findable]
        if len(freed) > 1:
            freed = np.array(list(dict.fromkeys(freed.tolist())), np.int32)
        self._push_free(freed)
        return freed

    def forget_cached(self) -> list[int]:
        """Every cached block becomes free; returns them."""
        blocks = list(self._cached)
        self._cached.clear()
        self.findable[blocks] = False
        self._push_free(np.array(blocks, np.int32))
        return blocks

    def free_blocks(self) -> np.ndarray:
        return self._free[: self._num_free].copy()

    def cached_blocks(self) -> np.ndarray:
        """Least recently used first."""
        return np.fromiter(self._cached, np.int32, len(self._cached))

    def _push_free(self, blocks: np.ndarray) -> None:
        self._free[self._num_free : self._num_free + len(blocks)] = blocks
        self._num_free += len(blocks)
