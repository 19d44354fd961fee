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
    """Raises AssertionError where a row would read what is not its own, in any layer group."""

    def __init__(self, num_slots: int, vocab_size: int, blocks: BlockManager, num_host_blocks: int | None):
        super().__init__(num_slots, vocab_size)
        self._manager = blocks
        self._size = blocks.block_size
        memory = blocks._memory
        self._windows = [spec.window for spec in memory.groups]
        self._cells = [np.full((pool.num_blocks, self._size), POISON, np.int64) for pool in memory.pools]
        self.host_cells = [np.full((num_host_blocks or 1, self._size), POISON, np.int64) for _ in memory.pools]
        self._sampled: dict[Sequence, dict[int, int]] = {}

    def launch(self, plan: StepPlan) -> None:
        for group, block, host_block in plan.saves:
            self.host_cells[group][host_block] = self._cells[group][block]
        for group, source, destination in plan.copies:
            self._cells[group][destination] = self._cells[group][source]
        for group, host_block, block in plan.loads:
            self._cells[group][block] = self.host_cells[group][host_block]
        for cells, unused in zip(self._cells, self._manager.unused_blocks()):
            cells[unused] = POISON
        rows = zip(plan.sequences, plan.slots.tolist(), plan.first_positions.tolist(), plan.num_scheduled.tolist())
        written = []
        for sequence, slot, first, count in rows:
            numbers = prefix_numbers(self._tokens(sequence, first + count))
            for table, cells in zip(self._manager.tables, self._cells):
                for position in range(first, first + count):
                    block = table[slot, position // self._size]
                    assert block != 0, f"{sequence.request_id}.{sequence.index} writes position {position} nowhere"
                    cells[block, position % self._size] = numbers[position]
            written.append((sequence, slot, first, numbers))
        for sequence, slot, first, numbers in written:  # all rows write before any row reads
            for window, table, cells in zip(self._windows, self._manager.tables, self._cells):
                begin = 0 if window is None else max(0, first - window + 1)
                positions = np.arange(begin, len(numbers))
                read = cells[table[slot, positions // self._size], positions % self._size]
                wrong = begin + np.flatnonzero(read != numbers[begin:])
                name = f"{sequence.request_id}.{sequence.index}, window {window}"
                assert not len(wrong), f"{name}: foreign KV at positions {wrong.tolist()}"
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
