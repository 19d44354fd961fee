"""The stand-in runner with a KV memory: each cell holds a number that only the right prefix gives, and is read back.

What attention would read of a row is compared with the row's own tokens, so a block that was shared, copied, swapped or
freed wrongly shows in the step in which it would give a wrong answer.
"""

from __future__ import annotations

import numpy as np

from jserve.kv import BlockManager
from jserve.runner.fake_runner import FakeRunner
from jserve.scheduler import Sequence, StepPlan

POISON = -1


class KvRunner(FakeRunner):
    """One layer group.  Raises AssertionError where a row would read what is not its own."""

    def __init__(self, num_slots: int, vocab_size: int, blocks: BlockManager, num_host_blocks: int | None):
        super().__init__(num_slots, vocab_size)
        self._manager = blocks
        [table] = blocks.tables
        num_blocks = blocks.num_total_blocks + 1
        self._table, self._size = table, blocks.block_size
        self._cells = np.full((num_blocks, blocks.block_size), POISON, np.int64)
        self.host_cells = np.full((num_host_blocks or 1, blocks.block_size), POISON, np.int64)
        self._sampled: dict[Sequence, dict[int, int]] = {}

    def launch(self, plan: StepPlan) -> None:
        for _, block, host_block in plan.saves:
            self.host_cells[host_block] = self._cells[block]
        for _, source, destination in plan.copies:
            self._cells[destination] = self._cells[source]
        for _, host_block, block in plan.loads:
            self._cells[block] = self.host_cells[host_block]
        [unused] = self._manager.unused_blocks()
        self._cells[unused] = POISON
        rows = zip(plan.sequences, plan.slots.tolist(), plan.first_positions.tolist(), plan.num_scheduled.tolist())
        ends = []
        for sequence, slot, first, count in rows:
            cells = prefix_numbers(self._tokens(sequence, first + count))
            for position in range(first, first + count):
                block = self._table[slot, position // self._size]
                assert block != 0, f"{sequence.request_id}.{sequence.index} writes position {position} nowhere"
                self._cells[block, position % self._size] = cells[position]
            ends.append((sequence, slot, cells))
        for sequence, slot, cells in ends:  # all rows write before any row reads
            positions = np.arange(len(cells))
            read = self._cells[self._table[slot, positions // self._size], positions % self._size]
            wrong = np.flatnonzero(read != cells)
            assert not len(wrong), f"{sequence.request_id}.{sequence.index} reads foreign KV at positions {wrong.tolist()}"
        super().launch(plan)
        for row, token_id in zip(plan.sampling_rows.tolist(), self._done[-1].token_ids.tolist()):
            position = int(plan.first_positions[row] + plan.num_scheduled[row])
            self._sampled.setdefault(plan.sequences[row], {})[position] = token_id

    def _tokens(self, sequence: Sequence, count: int) -> list[int]:
        """Of the host where it knows them, else as sampled here."""
        known = sequence.tokens[: min(count, sequence.num_known)].tolist()
        return known + [self._sampled[sequence][position] for position in range(len(known), count)]


def prefix_numbers(tokens: list[int]) -> np.ndarray:
    """i64[n]: a number of each position that depends on all tokens up to it."""
    numbers, number = [], 7
    for token in tokens:
        number = (number * 1_000_003 + token + 1) % (2**61 - 1)
        numbers.append(number)
    return np.array(numbers, np.int64)
