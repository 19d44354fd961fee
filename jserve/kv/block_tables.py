"""Block tables of all slots and the pools behind them: append, share, copy-on-write, give back.

The mapping alone: which block stands where, and who else names it. Knows positions but no tokens; what a block holds
is the prefix cache's business, which hears of every block that loses its content.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jserve.kv.block_pool import DEAD_BLOCK, BlockPool
from jserve.kv.groups import GroupSpec


class BlockTables:
    """Invariant: a block's owners are the table entries that name it. A block that its sequence may still write has
    one owner and is not findable, but for the last one after a fork, which is copied when its sequence grows."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        num_blocks: Sequence[int],
        block_size: int,
        num_slots: int,
        max_blocks_per_seq: int,
    ):
        self.groups = tuple(groups)
        self.has_windows = any(spec.window is not None for spec in self.groups)
        self.block_size = block_size
        self.max_blocks_per_seq = max_blocks_per_seq
        self.pools = tuple(BlockPool(count) for count in num_blocks)
        self.tables = tuple(np.zeros((num_slots, max_blocks_per_seq), np.int32) for _ in groups)
        self.live = np.zeros(num_slots, bool)
        self.num_blocks = np.zeros(num_slots, np.int64)  # entries in use, those behind a window included
        self.num_behind = np.zeros((len(groups), num_slots), np.int64)  # leading entries given back
        self.num_computed = np.zeros(num_slots, np.int64)  # tokens whose KV is known to be there
        self.shared_last = np.full(num_slots, -1, np.int64)  # index of a partial block shared by a fork, or -1
        self.num_expected = np.zeros(num_slots, np.int64)  # tokens that room is kept for, though blocks come by step
        self.step_tokens: int | None = None
        """Tokens by which a sequence can grow before what is behind its window comes back; None: never asked."""
        self._copies: dict[tuple[int, int], int] = {}  # (group, destination) -> source
        self._loads: dict[tuple[int, int], int] = {}  # (group, destination) -> host block
        self.on_evict: Callable[[int, list[int]], None] = lambda group, blocks: None
        """Hears of cached blocks that are being handed out to somebody else, before a copy due into them is cancelled."""
        self.num_copied_blocks = 0

    @property
    def num_available(self) -> int:
        """Blocks that every group can still hand out, free or cached."""
        return min(pool.num_available for pool in self.pools)

    def num_wanted(self, num_blocks: int, num_sequences: int = 1) -> np.ndarray:
        """i64[groups]: what of num_blocks, written by num_sequences step by step, is there at once: a window group
        gives back as it goes on, and never has more than its pool."""
        held = [spec.num_blocks_held(self.step_tokens, self.block_size) for spec in self.groups]
        most = [num_blocks if count is None else count * num_sequences for count in held]
        limits = [num_blocks if count is None else pool.num_usable for count, pool in zip(held, self.pools)]
        return np.minimum(num_blocks, np.minimum(most, limits))

    @property
    def num_unpromised(self) -> np.ndarray:
        """i64[groups]: blocks that can be handed out, less what sequences will yet take for what they expect."""
        available = np.array([pool.num_available for pool in self.pools])
        slots = np.flatnonzero(self.num_expected)
        if len(slots) == 0:
            return available
        counts, taken = -(-self.num_expected[slots] // self.block_size), self.num_blocks[slots]
        for group, spec in enumerate(self.groups):
            behind = self.num_behind[group, slots]
            held = spec.num_blocks_held(self.step_tokens, self.block_size)
            wanted = counts - behind if held is None else np.minimum(counts - behind, held)
            available[group] -= np.maximum(wanted - (taken - behind), 0).sum()
        return available

    @property
    def num_entries(self) -> int:
        """Table entries that name a block."""
        return int(self.num_blocks.sum()) * len(self.groups) - int(self.num_behind.sum())

    def fits(self, num_tokens: int, step_tokens: int | None) -> bool:
        count = -(-num_tokens // self.block_size)
        return count <= self.max_blocks_per_seq and all(
            min(count, spec.num_blocks_held(step_tokens, self.block_size) or count) <= pool.num_usable
            for spec, pool in zip(self.groups, self.pools)
        )

    def num_available_after_adopting(self, blocks: np.ndarray) -> np.ndarray:
        """i64[groups]: num_unpromised, less those of `blocks` (i32[groups, n]) that nobody owns yet."""
        num_tokens = blocks.shape[1] * self.block_size
        counts = self.num_unpromised
        for group, (pool, spec) in enumerate(zip(self.pools, self.groups)):
            taken = blocks[group, int(spec.num_blocks_behind(num_tokens, self.block_size)) :]
            counts[group] -= np.count_nonzero(pool.num_owners[taken] == 0)
        return counts

    def num_adopted(self, blocks: np.ndarray) -> np.ndarray:
        """i64[groups]: those of `blocks` (i32[groups, n]) that adopt takes."""
        count = blocks.shape[1]
        behind = [int(spec.num_blocks_behind(count * self.block_size, self.block_size)) for spec in self.groups]
        return count - np.array(behind)

    def occupy(self, slot: int) -> None:
        if self.live[slot]:
            raise ValueError(f"slot {slot} is taken")
        self.live[slot] = True

    def adopt(self, slot: int, blocks: np.ndarray) -> None:
        """Takes full, computed blocks (i32[groups, n]) as the head of an empty table; entries that a window does not
        need are left out."""
        count = blocks.shape[1]
        for group, spec in enumerate(self.groups):
            num_behind = int(spec.num_blocks_behind(count * self.block_size, self.block_size))
            self.pools[group].share(blocks[group, num_behind:])
            self.tables[group][slot, num_behind:count] = blocks[group, num_behind:]
            self.num_behind[group, slot] = num_behind
        self.num_blocks[slot] = count
        self.num_computed[slot] = count * self.block_size

    def num_new_blocks(self, slot: int, num_tokens: int) -> int:
        return self._num_missing(slot, num_tokens) + any(self._groups_to_copy(slot))

    def can_grow(self, slot: int, num_tokens: int) -> bool:
        num_missing = self._num_missing(slot, num_tokens)
        copied = self._groups_to_copy(slot)
        return all(num_missing + copy <= pool.num_available for pool, copy in zip(self.pools, copied))

    def grow(self, slot: int, num_tokens: int) -> bool:
        if not self.can_grow(slot, num_tokens):
            return False
        self._copy_shared_last(slot)
        self._append(np.array([slot]), np.array([self._num_missing(slot, num_tokens)]))
        return True

    def num_growable(self, slot: int) -> int:
        """Tokens that the slot can grow to now."""
        num_new = min(pool.num_available - copy for pool, copy in zip(self.pools, self._groups_to_copy(slot)))
        return 0 if num_new < 0 else (int(self.num_blocks[slot]) + num_new) * self.block_size

    def grow_each(self, slots: np.ndarray, num_tokens: np.ndarray) -> int:
        num_missing = np.maximum(-(-num_tokens // self.block_size) - self.num_blocks[slots], 0)
        forked = self.shared_last[slots] >= 0
        total, num_forked = int(num_missing.sum()), int(np.count_nonzero(forked))
        if total == 0 and num_forked == 0:
            return len(slots)
        if total + num_forked <= self.num_available:
            for slot in slots[forked].tolist():
                self._copy_shared_last(slot)
            self._append(slots, num_missing)
            return len(slots)
        if num_forked == 0:
            num_fitting = int(np.searchsorted(np.cumsum(num_missing), self.num_available, side="right"))
            self._append(slots[:num_fitting], num_missing[:num_fitting])
            return num_fitting
        for place, (slot, count) in enumerate(zip(slots.tolist(), num_tokens.tolist())):
            if not self.grow(slot, count):
                return place
        return len(slots)

    def can_fork(self, parent: int, num_tokens: int) -> bool:
        """Whether the parent still has all that is in the windows behind num_tokens."""
        return all(
            self.num_behind[group, parent] <= spec.num_blocks_behind(num_tokens, self.block_size)
            for group, spec in enumerate(self.groups)
        )

    def fork(self, parent: int, child: int, num_tokens: int) -> None:
        if num_tokens > self.num_computed[parent]:
            raise ValueError(f"fork at {num_tokens} tokens, but slot {parent} has {self.num_computed[parent]} computed")
        if not self.can_fork(parent, num_tokens):
            raise ValueError(f"fork at {num_tokens} tokens, but slot {parent} gave back blocks in that window")
        self.occupy(child)
        count = -(-num_tokens // self.block_size)
        for group, table in enumerate(self.tables):
            num_behind = int(self.num_behind[group, parent])
            self.pools[group].share(table[parent, num_behind:count])
            table[child, :count] = table[parent, :count]
            self.num_behind[group, child] = num_behind
        self.num_blocks[child] = count
        self.num_computed[child] = num_tokens
        if num_tokens % self.block_size:
            self.shared_last[child] = count - 1
            if self.num_computed[parent] < count * self.block_size:
                self.shared_last[parent] = count - 1

    def take_copies(self) -> list[tuple[int, int, int]]:
        copies = [(group, source, destination) for (group, destination), source in self._copies.items()]
        self._copies.clear()
        return copies

    # For swapping

    def entries(self, group: int, slot: int) -> np.ndarray:
        """A slot's table entries, those behind the window left out."""
        return self.tables[group][slot, int(self.num_behind[group, slot]) : int(self.num_blocks[slot])]

    def content_of(self, group: int, block: int) -> int:
        """Where the content of `block` is now: elsewhere while a copy into it is still due."""
        return self._copies.get((group, block), block)

    def awaits_load(self, group: int, block: int) -> bool:
        return (group, block) in self._loads

    def loads_from(self, group: int, host_blocks: np.ndarray) -> bool:
        pending = {host_block for (loaded, _), host_block in self._loads.items() if loaded == group}
        return not pending.isdisjoint(host_blocks.tolist())

    def load(self, group: int, host_blocks: np.ndarray) -> np.ndarray:
        """A new block, with one owner, for each host block, and the load that fills it."""
        blocks = self._allocate(group, len(host_blocks))
        self._loads.update(zip(((group, block) for block in blocks.tolist()), host_blocks.tolist()))
        return blocks

    def install(
        self, slot: int, entries: Sequence[np.ndarray], num_blocks: int, num_computed: int, shared_last: int
    ) -> None:
        """A whole table row at once for an empty slot; each block gains an owner."""
        self.occupy(slot)
        for group, blocks in enumerate(entries):
            self.pools[group].share(blocks)
            self.num_behind[group, slot] = num_blocks - len(blocks)
            self.tables[group][slot, num_blocks - len(blocks) : num_blocks] = blocks
        self.num_blocks[slot] = num_blocks
        self.num_computed[slot] = num_computed
        self.shared_last[slot] = shared_last

    def touch(self, group: int, blocks: np.ndarray) -> None:
        """Those of `blocks` (findable) that nobody owns are now the last to be reused."""
        self.pools[group].share(blocks)
        self._release(group, blocks)

    def unpin(self, group: int, blocks: np.ndarray) -> None:
        """One owner less, that was no table entry."""
        self._release(group, blocks)

    def due_blocks(self, group: int) -> list[int]:
        """Blocks that a copy or a load has yet to fill."""
        return [block for due in (self._copies, self._loads) for of_group, block in due if of_group == group]

    def take_loads(self) -> list[tuple[int, int, int]]:
        loads = [(group, host_block, block) for (group, block), host_block in self._loads.items()]
        self._loads.clear()
        return loads

    # Giving back

    def num_releasable(self, slots: np.ndarray, num_computed: np.ndarray) -> int:
        """Table entries that release_behind_window would give back."""
        count = 0
        for group, spec in enumerate(self.groups):
            if spec.window is not None:
                num_behind = spec.num_blocks_behind(num_computed, self.block_size)
                count += int(np.maximum(num_behind - self.num_behind[group, slots], 0).sum())
        return count

    def release_behind_window(self, slots: np.ndarray, num_computed: np.ndarray) -> None:
        for group, spec in enumerate(self.groups):
            if spec.window is None:
                continue
            num_behind = np.minimum(spec.num_blocks_behind(num_computed, self.block_size), self.num_blocks[slots])
            counts = np.maximum(num_behind - self.num_behind[group, slots], 0)
            if not counts.any():
                continue
            rows, columns = _spread(slots, self.num_behind[group, slots], counts)
            table = self.tables[group]
            blocks = table[rows, columns][::-1]
            table[rows, columns] = DEAD_BLOCK
            self.num_behind[group, slots] += counts
            self._release(group, blocks)

    def free(self, slot: int) -> None:
        if not self.live[slot]:
            raise ValueError(f"slot {slot} is empty")
        count = int(self.num_blocks[slot])
        for group, table in enumerate(self.tables):
            blocks = self.entries(group, slot)[::-1].copy()
            table[slot, :count] = DEAD_BLOCK
            self._release(group, blocks)
        self.live[slot] = False
        self.num_blocks[slot] = self.num_computed[slot] = self.num_expected[slot] = 0
        self.num_behind[:, slot] = 0
        self.shared_last[slot] = -1

    def _num_missing(self, slot: int, num_tokens: int) -> int:
        return max(-(-num_tokens // self.block_size) - int(self.num_blocks[slot]), 0)

    def _groups_to_copy(self, slot: int) -> list[bool]:
        """Per group: whether the slot's next write would change a block that somebody else reads."""
        index = int(self.shared_last[slot])
        if index < 0 or self.num_computed[slot] >= (index + 1) * self.block_size:
            return [False] * len(self.groups)
        blocks = [int(table[slot, index]) for table in self.tables]
        return [
            block != DEAD_BLOCK and bool(pool.num_owners[block] > 1 or pool.findable[block])
            for pool, block in zip(self.pools, blocks)
        ]

    def _copy_shared_last(self, slot: int) -> None:
        index = int(self.shared_last[slot])
        for group, copied in enumerate(self._groups_to_copy(slot)):
            if not copied:
                continue
            source = int(self.tables[group][slot, index])
            destination = int(self._allocate(group, 1)[0])
            self.tables[group][slot, index] = destination
            if (host_block := self._loads.get((group, source))) is not None:
                self._loads[group, destination] = host_block
            else:
                self._copies[group, destination] = self.content_of(group, source)
            self._release(group, np.array([source], np.int32))
            self.num_copied_blocks += 1
        self.shared_last[slot] = -1

    def _append(self, slots: np.ndarray, counts: np.ndarray) -> None:
        total = int(counts.sum())
        if total == 0:
            return
        starts = self.num_blocks[slots]
        if (longest := int((starts + counts).max())) > self.max_blocks_per_seq:
            raise ValueError(f"a sequence of {longest} blocks, but a table row has {self.max_blocks_per_seq}")
        rows, columns = _spread(slots, starts, counts)
        for group, table in enumerate(self.tables):
            table[rows, columns] = self._allocate(group, total)
        self.num_blocks[slots] += counts

    def _allocate(self, group: int, count: int) -> np.ndarray:
        blocks, evicted = self.pools[group].allocate(count)
        if evicted:
            self.on_evict(group, evicted)
            self.cancel_due(group, evicted)
        return blocks

    def _release(self, group: int, blocks: np.ndarray) -> None:
        freed = self.pools[group].release(blocks)
        self.cancel_due(group, freed.tolist())

    def cancel_due(self, group: int, blocks: list[int]) -> None:
        """Nobody waits any more for what was to be copied or loaded into `blocks`."""
        for due in (self._copies, self._loads):
            if due:
                for block in blocks:
                    due.pop((group, block), None)


def _spread(slots: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of `counts` table entries behind `starts`: slots [3, 5], starts [7, 2], counts [1, 2]
    give rows [3, 5, 5], columns [7, 2, 3]."""
    ends = np.cumsum(counts)
    within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
    return np.repeat(slots, counts), np.repeat(starts, counts) + within
