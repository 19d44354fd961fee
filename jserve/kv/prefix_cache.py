"""What of each running sequence the prefix index knows, and what a new sequence can take from it.

Stands between the tables (where blocks are) and the index (what they hold). Each slot stands on an index node: the
prefix of its full, registered blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jserve.kv.block_tables import BlockTables
from jserve.kv.groups import combined_hit
from jserve.kv.prefix_index import NO_BLOCK, PrefixIndex

_NEVER = np.iinfo(np.int64).max


class Standing(NamedTuple):
    """A place in the index: `node`, num_blocks below its root. None: a sequence that takes no part."""

    node: int | None
    num_blocks: int


class PrefixCache:
    """Invariant: a findable block is full and computed; a slot's standing is held in the index while it lasts."""

    def __init__(self, memory: BlockTables, index: PrefixIndex, num_slots: int, enabled: bool):
        self._memory = memory
        self._index = index
        self._num_groups = len(memory.groups)
        self.enabled = enabled
        self._standing = [_NOWHERE] * num_slots
        self._away: list[Standing] = []  # of sequences in host memory
        self._has_duplicates = [False] * num_slots
        self.next_border = np.full(num_slots, _NEVER)
        """Computed tokens from which `register` has something to do."""
        self.on_evict: Callable[[int, list[int], list[int]], None] | None = None
        """Hears of (group, index nodes, blocks) before the blocks of cached prefixes go to somebody else."""
        self.num_evicted_blocks = 0
        self.num_duplicate_blocks = 0

    def find(self, tokens: np.ndarray, salt: bytes) -> np.ndarray:
        """i32[groups, n]: blocks of the longest prefix that all groups can take, less than all of `tokens`."""
        if not self.enabled:
            return np.zeros((len(self._memory.groups), 0), np.int32)
        root = self._index.root(salt)
        _, blocks = self._find(root, tokens)
        self._index.drop(root)
        return blocks

    def num_shareable(self, tokens: np.ndarray) -> int:
        """Blocks that `find` can return at most: full ones that leave the last token to compute."""
        return min(max(len(tokens) - 1, 0) // self._memory.block_size, self._memory.max_blocks_per_seq)

    def enter(self, slot: int, tokens: np.ndarray, salt: bytes, use_cache: bool) -> int:
        """Gives an empty slot what can be found of `tokens`; returns how many blocks."""
        if not self.enabled:
            return 0
        node, num_blocks = self._index.root(salt), 0
        if use_cache:
            nodes, blocks = self._find(node, tokens)
            if nodes:
                self._memory.adopt(slot, blocks)
                self._index.hold(nodes[-1])
                self._index.drop(node)
                node, num_blocks = nodes[-1], len(nodes)
        self._stand(slot, Standing(node, num_blocks))
        return num_blocks

    def register(self, slot: int, tokens: np.ndarray, num_computed: int) -> None:
        """Makes the slot's full blocks among the first num_computed tokens findable, those that are not yet."""
        start = self._standing[slot]
        node, first, size = start.node, start.num_blocks, self._memory.block_size
        last = num_computed // size
        data = tokens[first * size : last * size].astype(np.int32, copy=False).tobytes()
        rows = zip(*(table[slot, first:last].tolist() for table in self._memory.tables))
        for place, blocks in enumerate(rows):
            registered = self._index.register(node, data[4 * size * place : 4 * size * (place + 1)], blocks)
            if registered is None:  # a colliding key: from here on the sequence cannot be found
                last = None
                break
            node, filled = registered
            self._mark_findable(blocks, filled)
            if len(filled) < len(blocks) - blocks.count(NO_BLOCK):
                self._has_duplicates[slot] = True
                self.num_duplicate_blocks += 1
        self._index.hold(node)
        self._index.drop(start.node)
        if last is None:
            self._index.drop(node)
            self._stand(slot, _NOWHERE)
        else:
            self._stand(slot, Standing(node, last))

    def fork(self, parent: int, child: int, num_tokens: int) -> None:
        node, num_registered = self._standing[parent].node, self._standing[parent].num_blocks
        if node is None:
            return
        num_blocks = min(num_registered, num_tokens // self._memory.block_size)
        for _ in range(num_registered - num_blocks):
            node = self._index.parent(node)
        self._index.hold(node)
        self._stand(child, Standing(node, num_blocks))
        self._has_duplicates[child] = self._has_duplicates[parent]

    def leave(self, slot: int) -> None:
        """To be called before the slot's blocks are released."""
        standing = self._standing[slot]
        if standing.node is not None:
            if self._has_duplicates[slot]:
                self._offer_duplicates(slot, standing)
            self._index.drop(standing.node)
        self._stand(slot, _NOWHERE)
        self._has_duplicates[slot] = False

    def flush(self) -> int:
        self._index.forget_last_match()
        num_forgotten = 0
        for group, pool in enumerate(self._memory.pools):
            blocks = pool.forget_cached()
            self._memory.cancel_due(group, blocks)
            for block in blocks:
                self._index.evict(group, block)
            num_forgotten += len(blocks)
        return num_forgotten

    def forget(self, group: int, blocks: list[int]) -> None:
        """Cached blocks were handed out to somebody else."""
        self.num_evicted_blocks += len(blocks)
        if self.on_evict is not None:
            self.on_evict(group, [self._index.node_at(group, block) for block in blocks], blocks)
        for block in blocks:
            self._index.evict(group, block)

    # Sequences in host memory

    def hold_standing(self, slot: int) -> Standing:
        """The slot's standing, kept while its sequence is away."""
        standing = self._standing[slot]
        if standing.node is not None:
            self._index.hold(standing.node)
            self._away.append(standing)
        return standing

    def drop_standing(self, standing: Standing) -> None:
        if standing.node is not None:
            self._away.remove(standing)
            self._index.drop(standing.node)

    def resident_blocks(self, standing: Standing) -> np.ndarray:
        """i32[groups, num_blocks]: blocks that still hold the prefix of a sequence that is away, or NO_BLOCK."""
        return self._index.blocks(self._index.path(standing.node, standing.num_blocks))[: self._num_groups]

    def resume(self, slot: int, standing: Standing) -> None:
        """The sequence is back, its blocks are in the table: those that could not be found any more can again."""
        if standing.node is not None:
            self._index.hold(standing.node)
            self._stand(slot, standing)
            self._has_duplicates[slot] = True
            self._offer_duplicates(slot, standing)

    def check(self, holders: Sequence[int] = ()) -> list[str]:
        """holders: index nodes that others hold, once for each hold."""
        holders = [standing.node for standing in self._standing + self._away if standing.node is not None] + [*holders]
        problems = self._index.check(holders)
        for group, pool in enumerate(self._memory.pools):
            if set(np.flatnonzero(pool.findable).tolist()) != set(self._index.findable_blocks(group)):
                problems.append(f"group {group}: the findable blocks of pool and index differ")
        return problems

    def _find(self, root: int, tokens: np.ndarray) -> tuple[list[int], np.ndarray]:
        nodes = self._index.match(root, tokens, self.num_shareable(tokens))
        blocks = self._index.blocks(nodes)[: self._num_groups]
        num_hit = combined_hit(blocks != NO_BLOCK, self._memory.groups, self._memory.block_size)
        return nodes[:num_hit], blocks[:, :num_hit]

    def _stand(self, slot: int, standing: Standing) -> None:
        self._standing[slot] = standing
        self.next_border[slot] = (
            _NEVER if standing.node is None else (standing.num_blocks + 1) * self._memory.block_size
        )

    def _offer_duplicates(self, slot: int, standing: Standing) -> None:
        """Makes the slot's own copies findable where the first ones are gone by now."""
        node = standing.node
        for index in range(standing.num_blocks - 1, -1, -1):
            blocks = [int(table[slot, index]) for table in self._memory.tables]
            self._mark_findable(blocks, self._index.fill(node, blocks))
            node = self._index.parent(node)

    def _mark_findable(self, blocks: Sequence[int], groups: list[int]) -> None:
        for group in groups:
            self._memory.pools[group].findable[blocks[group]] = True


_NOWHERE = Standing(None, 0)
