"""Host memory as a tier of the prefix cache: where blocks go that the device reuses, and from where they come back.

It lives in what swapping leaves free of the host blocks: swapped sequences take the blocks of the tier, never the other
way round. A block that came back is kept in both memories, so that it need not be saved again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jserve.kv.block_pool import BlockPool
from jserve.kv.block_tables import BlockTables
from jserve.kv.integrity import host_violations
from jserve.kv.prefix_index import NO_BLOCK, PrefixIndex

Copy = tuple[int, int, int]
"""(group, source block, destination block)"""


class HostTier:
    """Invariant: what it keeps is findable in its columns of the index, those behind the device's; a host block has
    owners here exactly while copies from or to it run."""

    def __init__(self, memory: BlockTables, index: PrefixIndex, pools: Sequence[BlockPool]):
        """pools: of the host blocks, shared with swapping."""
        self.pools = tuple(pools)
        self._memory = memory
        self._index = index
        self._first_column = len(memory.groups)
        self._saves: dict[tuple[int, int], int] = {}  # (group, host block) -> device block, due
        self._arriving: set[tuple[int, int]] = set()  # saves that are due or run
        self._loading: list[tuple[int, int]] = []  # host blocks whose loads are due
        self._loaded: list[tuple[int, int]] = []  # host blocks that the plan now being made reads
        self.on_arrival: Callable[[int, list[int], list[int]], None] = lambda group, nodes, host_blocks: None
        """Hears of the blocks that have come from the device."""
        self.num_saved_blocks = self.num_loaded_blocks = self.num_dropped_blocks = 0
        """Dropped: handed out to somebody else. Moved: copies that were part of a step."""

    # The tier

    def lookup(self, group: int, node: int) -> bool:
        return self._index.block(self._first_column + group, node) != NO_BLOCK

    def save(self, group: int, nodes: Sequence[int], blocks: Sequence[int]) -> None:
        """blocks: on the device; what they hold now is copied before anybody writes to them."""
        column, pool = self._first_column + group, self.pools[group]
        known = [self._index.block(column, node) for node in nodes]
        if present := [host_block for host_block in known if host_block != NO_BLOCK]:
            self._touch(group, present)
        # What is still to come from a swapped sequence is not on the device to be saved.
        pairs = [
            (node, block)
            for node, block, host_block in zip(nodes, blocks, known)
            if host_block == NO_BLOCK and not self._memory.awaits_load(group, block)
        ]
        if not pairs or not pool.num_available:
            return
        pairs = pairs[-pool.num_available :]
        host_blocks, evicted = pool.allocate(len(pairs))
        self.forget(group, evicted)
        pool.findable[host_blocks] = True
        for (node, block), host_block in zip(pairs, host_blocks.tolist()):
            self._index.place(column, node, host_block)
            self._saves[group, host_block] = block
            self._arriving.add((group, host_block))

    def load(self, group: int, node: int) -> bool:
        """Into a device block that is cached from now on; the next step's loads fill it."""
        pool = self._memory.pools[group]
        if not pool.num_available:
            return False
        host_block = self._index.block(self._first_column + group, node)
        self.pools[group].share(np.array([host_block], np.int32))
        self._loading.append((group, host_block))
        blocks = self._memory.load(group, np.array([host_block], np.int32))
        self._index.place(group, node, int(blocks[0]))
        pool.findable[blocks] = True
        self._memory.unpin(group, blocks)
        return True

    # Its blocks

    def take(self, group: int) -> int:
        """A host block with one owner; there is one available."""
        blocks, evicted = self.pools[group].allocate(1)
        self.forget(group, evicted)
        return int(blocks[0])

    def keep(self, group: int, node: int, host_block: int) -> None:
        """`host_block`, which the caller owns, is where the node's content is found."""
        self._index.place(self._first_column + group, node, host_block)
        self.pools[group].findable[host_block] = True

    def has(self, group: int, node: int, host_block: int) -> bool:
        """Whether the node's content is in that very block by now."""
        is_there = (group, host_block) not in self._arriving
        return is_there and self._index.node_at(self._first_column + group, host_block) == node

    def touch(self, group: int, node: int) -> None:
        """The node's block is now the last to be dropped."""
        self._touch(group, [self._index.block(self._first_column + group, node)])

    def share(self, group: int, host_block: int) -> None:
        """One more copy from it runs."""
        self.pools[group].share(np.array([host_block], np.int32))

    def release(self, group: int, host_block: int) -> None:
        """A copy from or to it is done."""
        self.pools[group].release(np.array([host_block], np.int32))

    def forget(self, group: int, host_blocks: Sequence[int]) -> None:
        """Cached host blocks were handed out to somebody else."""
        self.num_dropped_blocks += len(host_blocks)
        for host_block in host_blocks:
            self._index.evict(self._first_column + group, host_block)

    @property
    def num_cached_blocks(self) -> int:
        return sum(int(pool.findable.sum()) for pool in self.pools)

    @property
    def num_loads_due(self) -> int:
        return len(self._loading)

    # Copies

    def take_saves(self) -> list[Copy]:
        """(group, device block, host block) to be run first of all; `arrived` says when they have."""
        saves = [(group, block, host_block) for (group, host_block), block in self._saves.items()]
        self._saves.clear()
        self.num_saved_blocks += len(saves)
        return saves

    def save_cached(self) -> None:
        """Starts to save what only the device has cached, the last used first, as far as there is room."""
        for group, (pool, host_pool) in enumerate(zip(self._memory.pools, self.pools)):
            blocks = pool.cached_blocks()[::-1][: host_pool.num_available].tolist()
            self.save(group, [self._index.node_at(group, block) for block in blocks], blocks)

    def loads_taken(self, loads: Sequence[Copy]) -> None:
        """The loads that were due are part of a plan; of those that were cancelled nobody hears again."""
        sources = set(self._loading)
        self.num_loaded_blocks += sum((group, host_block) in sources for group, host_block, _ in loads)
        self._loaded += self._loading
        self._loading = []

    def release_loaded(self) -> None:
        """The step with the last loads taken has been started, and has read its host blocks."""
        for group, host_block in self._loaded:
            self.release(group, host_block)
        self._loaded = []

    def arrived(self, saves: Sequence[Copy]) -> None:
        """The step with these saves is done; among them may be those of swapped sequences."""
        for group, pool in enumerate(self.pools):
            column = self._first_column + group
            of_group = [host_block for group_saved, _, host_block in saves if group_saved == group]
            host_blocks = [host_block for host_block in of_group if (group, host_block) in self._arriving]
            self._arriving.difference_update((group, host_block) for host_block in host_blocks)
            if host_blocks:
                nodes = [self._index.node_at(column, host_block) for host_block in host_blocks]
                found = [pair for pair in zip(nodes, host_blocks) if pair[0] is not None]
                self.on_arrival(group, [node for node, _ in found], [host_block for _, host_block in found])
                pool.release(np.array(host_blocks, np.int32))

    # The end of it

    def flush(self) -> int:
        """Forgets what it keeps; returns how many blocks. Copies go on, also those that are due: somebody may have
        found what they bring. Nobody else will."""
        num_forgotten = 0
        for group, pool in enumerate(self.pools):
            for host_block in np.flatnonzero(pool.findable).tolist():
                self._index.evict(self._first_column + group, host_block)
                num_forgotten += 1
            pool.forget_cached()
            pool.findable[:] = False
        return num_forgotten

    def forget_copies(self) -> None:
        """The device is gone, and with it all copies from and to it."""
        self.flush()
        self._saves.clear()
        for group, host_block in [*self._arriving, *self._loading, *self._loaded]:
            self.release(group, host_block)
        self._arriving.clear()
        self._loading, self._loaded = [], []

    def check(self, other_owners: Sequence[np.ndarray]) -> list[str]:
        """Violations in words. other_owners: per group, owners of each host block that are not of this tier."""
        owners = [one.copy() for one in other_owners]
        for group, host_block in [*self._arriving, *self._loading, *self._loaded]:
            owners[group][host_block] += 1
        problems = host_violations(self.pools, owners)
        for group, pool in enumerate(self.pools):
            known = self._index.findable_blocks(self._first_column + group)
            if set(np.flatnonzero(pool.findable).tolist()) != set(known):
                problems.append(f"host memory, group {group}: the findable blocks of pool and index differ")
        return problems

    def _touch(self, group: int, host_blocks: list[int]) -> None:
        blocks = np.array(host_blocks, np.int32)
        self.pools[group].share(blocks)
        self.pools[group].release(blocks)
