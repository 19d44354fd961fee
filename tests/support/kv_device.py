"""A stand-in for the device's KV pools: each cell holds the whole prefix that its KV would depend on.

Writes go through the block tables, copies and swaps move cells, so that a sequence that reads back anything but its
own prefix has hit a bookkeeping fault.
"""

import numpy as np

from jserve.kv import BlockManager
from tests.support.block_store import MemoryStore

POISON = -7


def prefix_ids(salt: bytes, tokens) -> np.ndarray:
    """One id per position for (salt, tokens up to and including it); equal exactly where all of that is equal."""
    ids, standing = np.empty(len(tokens), np.int64), hash(salt) & 0xFFFF
    for place, token in enumerate(tokens):
        standing = hash((standing, int(token))) >> 2
        ids[place] = standing
    return ids


class KvDevice:
    """Runs what a BlockManager decides, in the order a device would."""

    def __init__(self, groups, num_blocks, block_size, num_host_blocks=None, has_disk=False, **options):
        self.groups, self.block_size, self.in_order = groups, block_size, False
        self.cells = [np.zeros((count, block_size), np.int64) for count in num_blocks]
        self.host_cells = [np.zeros((count, block_size), np.int64) for count in num_host_blocks or []]
        self.store = MemoryStore(self._host_content, self._set_host_content) if has_disk else None
        self._arriving = []
        self.manager = BlockManager(
            disk=self.store,
            groups=groups,
            num_blocks=num_blocks,
            block_size=block_size,
            num_host_blocks=num_host_blocks,
            **options,
        )

    def run_copies(self) -> None:
        """What runs between two steps. Copies run in order, or read all their sources before any is written."""
        saves = self.manager.take_saves()
        for group, block, host_block in saves:
            self.host_cells[group][host_block] = self.cells[group][block]
        copies = self.manager.take_copies()
        assert len({(group, destination) for group, _, destination in copies}) == len(copies)
        self.in_order = not self.in_order
        contents = [self.cells[group][source].copy() for group, source, _ in copies]
        for (group, source, destination), content in zip(copies, contents):
            self.cells[group][destination] = self.cells[group][source] if self.in_order else content
        loads = self.manager.take_loads()
        assert len({(group, block) for group, _, block in loads}) == len(loads)
        for group, host_block, block in loads:
            self.cells[group][block] = self.host_cells[group][host_block]
        for cells, blocks in zip(self.cells, self.manager.unused_blocks()):
            cells[blocks] = POISON
        if self.manager.tiers is not None:
            self.manager.tiers.poll()
        self.manager.saves_arrived(self._arriving)  # of the step before: results are read one step late
        self._arriving = saves

    def arrive(self) -> None:
        """The last step's results are on the host."""
        self.manager.saves_arrived(self._arriving)
        self._arriving = []

    def _host_content(self, transfer) -> np.ndarray:
        return self.host_cells[transfer.group][transfer.host_block].copy()

    def _set_host_content(self, transfer, content) -> None:
        self.host_cells[transfer.group][transfer.host_block] = content

    def write(self, slot: int, first: int, ids: np.ndarray) -> None:
        """One step's KV of `slot` at positions first and on."""
        positions = np.arange(first, first + len(ids))
        for table, cells in zip(self.manager.tables, self.cells):
            blocks = table[slot, positions // self.block_size]
            assert (blocks > 0).all(), "a write to the dead block"
            cells[blocks, positions % self.block_size] = ids

    def read(self, slot: int, num_tokens: int) -> list[tuple[int, np.ndarray]]:
        """Per group: first position that the next query sees, and the cells from there to num_tokens."""
        views = []
        for spec, table, cells in zip(self.groups, self.manager.tables, self.cells):
            first = 0 if spec.window is None else max(0, num_tokens - spec.window + 1)
            positions = np.arange(first, num_tokens)
            blocks = table[slot, positions // self.block_size]
            views.append((first, cells[blocks, positions % self.block_size]))
        return views
