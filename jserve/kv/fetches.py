"""Prefixes on their way back to the device: from host memory, and from the disk through host memory.

What has arrived is cached on the device like anything else, so whoever fetched it finds it there when it enters, and
owns nothing until then: a fetch never keeps a block from a running sequence.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from jserve.kv.block_tables import BlockTables
from jserve.kv.disk_tier import DiskTier
from jserve.kv.groups import combined_hit
from jserve.kv.host_tier import HostTier
from jserve.kv.prefix_cache import PrefixCache
from jserve.kv.prefix_index import NO_BLOCK, PrefixIndex

READ_AHEAD = 16
"""Blocks that are read from the disk before the first of them is there."""


@dataclass(eq=False)
class Fetch:
    """What one prefix still lacks on the device."""

    deepest: int
    """Node of the prefix that is on its way; held."""
    wanted: deque[tuple[int, int]]
    """(group, node), the head of the chain first."""
    from_disk: set[int] = field(default_factory=set)
    """Nodes that were read for it."""
    last_counted: int | None = None


class Fetcher:
    """Begins, advances and ends fetches. Only a block at a time is looked at, so others may come and go between."""

    def __init__(
        self, memory: BlockTables, index: PrefixIndex, cache: PrefixCache, host: HostTier, disk: DiskTier | None
    ):
        self._memory = memory
        self._index = index
        self._cache = cache
        self._host = host
        self._disk = disk
        # No more than host memory has room for beside them: else what is read takes the place of what was.
        self._read_ahead_blocks = min([READ_AHEAD, *(-(-pool.num_usable // 2) for pool in host.pools)])
        self._going: dict[Fetch, None] = {}
        self.num_host_hit_tokens = self.num_disk_hit_tokens = 0
        """Of prefixes that came back."""

    def begin(self, tokens: np.ndarray, salt: bytes) -> Fetch | None:
        """None where the tiers know nothing that would make the cached part of `tokens` longer."""
        if not self._cache.enabled:
            return None
        num_groups = len(self._memory.groups)
        root = self._index.root(salt)
        nodes = self._index.match(root, tokens, self._cache.num_shareable(tokens))
        if self._disk is not None:
            size = self._memory.block_size
            rest = tokens[len(nodes) * size : self._cache.num_shareable(tokens) * size]
            nodes += self._disk.extend(nodes[-1] if nodes else root, rest.astype(np.int32, copy=False).tobytes())
        deepest = nodes[-1] if nodes else root
        self._index.hold(deepest)
        self._index.drop(root)
        columns = self._index.blocks(nodes) != NO_BLOCK
        on_device, held = columns[:num_groups], columns[:num_groups] | columns[num_groups:]
        if self._disk is not None:
            for group, place in zip(*np.nonzero(~held)):
                held[group, place] = self._disk.lookup(int(group), nodes[place])
        size = self._memory.block_size
        num_hit = combined_hit(held, self._memory.groups, size)
        if num_hit == combined_hit(on_device, self._memory.groups, size):
            self._index.drop(deepest)
            return None
        behind = [int(spec.num_blocks_behind(num_hit * size, size)) for spec in self._memory.groups]
        needed = [(group, place) for place in range(num_hit) for group in range(num_groups) if place >= behind[group]]
        for group, place in reversed(needed):  # none of it is to be evicted for the sake of the rest
            if on_device[group, place]:
                self._memory.touch(group, np.array([self._index.block(group, nodes[place])], np.int32))
            elif columns[num_groups + group, place]:
                self._host.touch(group, nodes[place])
        wanted = deque((group, nodes[place]) for group, place in needed if not on_device[group, place])
        fetch = Fetch(deepest, wanted)
        self._going[fetch] = None
        return fetch

    def advance(self, fetch: Fetch, most: int) -> bool:
        """Starts up to `most` loads; True once all that will come is cached on the device."""
        self._read_ahead(fetch)
        while fetch.wanted:
            group, node = fetch.wanted[0]
            if not self._index.block(group, node):
                if self._host.lookup(group, node):
                    if most == 0:
                        return False
                    if not self._host.load(group, node):
                        return True
                    most -= 1
                    self._count(fetch, node)
                else:
                    return not (self._disk is not None and self._disk.is_loading(group, node))
            fetch.wanted.popleft()
            self._read_ahead(fetch)
        return True

    def end(self, fetch: Fetch) -> None:
        """Nobody waits for it any more."""
        del self._going[fetch]
        self._index.drop(fetch.deepest)

    def held_nodes(self) -> list[int]:
        return [fetch.deepest for fetch in self._going]

    def _read_ahead(self, fetch: Fetch) -> None:
        if self._disk is None:
            return
        for group, node in islice(fetch.wanted, self._read_ahead_blocks):
            if self._index.block(group, node) or self._host.lookup(group, node):
                continue
            if not self._disk.is_loading(group, node) and not (
                self._disk.lookup(group, node) and self._disk.load(group, node)
            ):
                return
            fetch.from_disk.add(node)

    def _count(self, fetch: Fetch, node: int) -> None:
        """A prefix's block counts once, whatever the number of layer groups."""
        if node == fetch.last_counted:
            return
        fetch.last_counted = node
        if node in fetch.from_disk:
            self.num_disk_hit_tokens += self._memory.block_size
        else:
            self.num_host_hit_tokens += self._memory.block_size
