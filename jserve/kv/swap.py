"""Bookkeeping of sequences that wait in host memory: which host block holds what, and which copies are due.

A swapped group of sequences keeps its sharing: a block that several of them name is saved once and comes back once.
Knows ids only; whoever moves the bytes runs the saves, then the block copies, then the loads, then the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jserve.kv.block_pool import BlockPool
from jserve.kv.block_tables import BlockTables
from jserve.kv.prefix_cache import Standing


@dataclass(frozen=True)
class SwappedRow:
    """One sequence's table row, in host blocks."""

    host_blocks: tuple[np.ndarray, ...]
    """Per group i32: the entries from num_behind[group] on."""
    num_behind: tuple[int, ...]
    num_blocks: int
    num_computed: int
    shared_last: int
    standing: Standing
    """In the prefix index; held until released."""


@dataclass(frozen=True)
class SwappedBlocks:
    """Sequences in host memory; theirs until release_swapped, whatever happens to the requests."""

    rows: tuple[SwappedRow, ...]
    num_host_blocks: int
    """Of the group that has most."""


class HostSwap:
    """Invariant: a host block's one owner is the SwappedBlocks it was allocated for."""

    def __init__(self, memory: BlockTables, num_host_blocks: Sequence[int]):
        """num_host_blocks: per group, host block 0, which is never used, included."""
        self.pools = tuple(BlockPool(count) for count in num_host_blocks)
        self._memory = memory
        self.on_evict: Callable[[int, list[int]], None] = lambda group, host_blocks: None
        """Hears of cached host blocks (of the prefix cache's host tier) that were handed out here."""
        self.owners = tuple(np.zeros(count, np.int32) for count in num_host_blocks)
        """Per group: of each host block, those of SwappedBlocks."""
        self._saves: dict[tuple[int, int], int] = {}  # (group, host block) -> device block

    def can_save(self, slots: Sequence[int]) -> bool:
        """Whether the host has room, and all that `slots` name has arrived from there."""
        return all(
            len(blocks) <= pool.num_available
            and not any(self._memory.awaits_load(group, block) for block in blocks.tolist())
            for group, (pool, blocks) in enumerate(zip(self.pools, self._distinct_blocks(slots)))
        )

    def save(self, slots: Sequence[int], standing: Sequence[Standing]) -> SwappedBlocks:
        """Host blocks for all that `slots` name; the slots keep their device blocks. standing: of each slot, in the
        prefix index."""
        memory = self._memory
        distinct = self._distinct_blocks(slots)
        host_rows: list[list[np.ndarray]] = []
        for group, blocks in enumerate(distinct):
            host_blocks, evicted = self.pools[group].allocate(len(blocks))
            self.on_evict(group, evicted)
            self.owners[group][host_blocks] += 1
            for block, host_block in zip(blocks.tolist(), host_blocks.tolist()):
                self._saves[group, host_block] = memory.content_of(group, block)
            rows_of_group = (memory.entries(group, slot) for slot in slots)
            host_rows.append([host_blocks[np.searchsorted(blocks, row)] for row in rows_of_group])
        rows = tuple(
            SwappedRow(
                host_blocks=tuple(group_rows[place] for group_rows in host_rows),
                num_behind=tuple(memory.num_behind[:, slot].tolist()),
                num_blocks=int(memory.num_blocks[slot]),
                num_computed=int(memory.num_computed[slot]),
                shared_last=int(memory.shared_last[slot]),
                standing=standing[place],
            )
            for place, slot in enumerate(slots)
        )
        return SwappedBlocks(rows, max(len(blocks) for blocks in distinct))

    def restore(self, slots: Sequence[int], swapped: SwappedBlocks, resident: Sequence[np.ndarray]) -> bool:
        """Device blocks for empty `slots`; False, and nothing changed, where they do not fit.

        resident: per row i32[groups, n], device blocks that still hold the row's first n blocks, or 0 where none does;
        they are shared instead of loaded.
        """
        memory = self._memory
        mapped = [self._map_to_device(group, swapped, resident) for group in range(len(self.pools))]
        # Resident blocks get an owner at once, so that making room for the others does not evict them.
        pinned = [np.unique(device_blocks[device_blocks != 0]) for _, device_blocks in mapped]
        for pool, blocks in zip(memory.pools, pinned):
            pool.share(blocks)
        fits = all(
            np.count_nonzero(device_blocks == 0) <= pool.num_available
            for pool, (_, device_blocks) in zip(memory.pools, mapped)
        )
        if fits:
            for group, (host_blocks, device_blocks) in enumerate(mapped):
                absent = device_blocks == 0
                device_blocks[absent] = memory.load(group, host_blocks[absent])
                pinned[group] = np.concatenate([pinned[group], device_blocks[absent]])
            for slot, row in zip(slots, swapped.rows):
                entries = [
                    device_blocks[np.searchsorted(host_blocks, row.host_blocks[group])]
                    for group, (host_blocks, device_blocks) in enumerate(mapped)
                ]
                memory.install(slot, entries, row.num_blocks, row.num_computed, row.shared_last)
        for group, blocks in enumerate(pinned):
            memory.unpin(group, blocks)
        return fits

    def release(self, swapped: SwappedBlocks) -> None:
        """Frees the host blocks. Only once no copy from or to them is running."""
        for group, pool in enumerate(self.pools):
            host_blocks = np.unique(np.concatenate([row.host_blocks[group] for row in swapped.rows]))
            if self._memory.loads_from(group, host_blocks):
                raise ValueError("host blocks released before their loads were taken")
            if (self.owners[group][host_blocks] != 1).any():
                raise ValueError("host blocks released twice")
            self.owners[group][host_blocks] = 0
            for host_block in host_blocks.tolist():
                self._saves.pop((group, host_block), None)
            pool.release(host_blocks)

    def take_saves(self) -> list[tuple[int, int, int]]:
        saves = [(group, device_block, host_block) for (group, host_block), device_block in self._saves.items()]
        self._saves.clear()
        return saves

    def _distinct_blocks(self, slots: Sequence[int]) -> list[np.ndarray]:
        """Per group: the device blocks that `slots` name, each once."""
        return [
            np.unique(np.concatenate([self._memory.entries(group, slot) for slot in slots]))
            for group in range(len(self.pools))
        ]

    def _map_to_device(
        self, group: int, swapped: SwappedBlocks, resident: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The group's host blocks, each once, ascending, and the device block that still holds each, or 0."""
        host_blocks = np.unique(np.concatenate([row.host_blocks[group] for row in swapped.rows]))
        device_blocks = np.zeros_like(host_blocks)
        for row, known in zip(swapped.rows, resident):
            known = known[group, row.num_behind[group] :]
            device_blocks[np.searchsorted(host_blocks, row.host_blocks[group][: len(known)])] = known
        return host_blocks, device_blocks
