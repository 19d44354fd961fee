"""KV memory of all running sequences: admit, grow, commit, fork, free, over block tables and a prefix cache.

The scheduler calls it once a step. Knows slots, token ids and block ids; never an array on the device, a request or
a policy. What it decides about the device, block copies, it hands out through take_copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jserve.kv.block_keys import HashBlock, hash_block as chain_hash
from jserve.kv.block_tables import BlockTables
from jserve.kv.groups import GroupSpec, combined_hit
from jserve.kv.prefix_index import HashLookup, PrefixIndex, TreeLookup
from jserve.kv.swap import HostSwap, SwappedBlocks

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class CacheStats:
    """Counters since the start."""

    num_queried_tokens: int
    num_hit_tokens: int
    num_evicted_blocks: int
    num_duplicate_blocks: int
    """Full blocks computed although another block held the same prefix."""
    num_copied_blocks: int


class BlockManager:
    """Invariants: those of BlockTables, BlockPool and PrefixIndex; and a findable block is full and computed, so it
    never changes while it is findable."""

    def __init__(
        self,
        *,
        groups: Sequence[GroupSpec],
        num_blocks: Sequence[int],
        block_size: int,
        num_slots: int,
        max_blocks_per_seq: int,
        prefix_cache: bool = True,
        root_key: bytes = b"",
        hash_block: HashBlock = chain_hash,
        index: str = "hash",
        num_host_blocks: Sequence[int] | None = None,
    ):
        """num_blocks: per group, the dead block included. root_key: all that changes KV (block_keys.root_key).
        num_host_blocks: host memory to swap to, per group, block 0 (never used) included; None: no swapping."""
        if len(groups) != len(num_blocks) or not groups:
            raise ValueError(f"{len(groups)} groups, but num_blocks for {len(num_blocks)}")
        lookups = {"hash": lambda: HashLookup(root_key, block_size, hash_block), "radix": TreeLookup}
        if index not in lookups:
            raise ValueError(f"index is {index!r}, expected one of: {', '.join(lookups)}")
        self.block_size = block_size
        self._memory = BlockTables(
            groups, num_blocks, block_size, num_slots, max_blocks_per_seq, on_evict=self._forget
        )
        self.tables = self._memory.tables
        self._swap = None if num_host_blocks is None else HostSwap(self._memory, num_host_blocks)
        self._prefix_cache = prefix_cache
        self._index = PrefixIndex(len(groups), block_size, lookups[index]())
        self._node: list[int | None] = [None] * num_slots  # where each sequence stands in the index
        self._num_registered = np.zeros(num_slots, np.int64)  # blocks from the start up to that node
        self._next_border = np.full(num_slots, _NEVER)  # computed tokens from which commit registers again
        self._has_duplicates = np.zeros(num_slots, bool)
        self._swapped_nodes: list[int] = []  # held for sequences in host memory
        self._num_queried_tokens = self._num_hit_tokens = self._num_evicted_blocks = self._num_duplicate_blocks = 0

    # What there is

    @property
    def num_total_blocks(self) -> int:
        """Usable blocks of all groups: free + cached + used."""
        return sum(pool.num_usable for pool in self._memory.pools)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that hold nothing."""
        return sum(pool.num_free for pool in self._memory.pools)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks without an owner that the prefix cache still finds; handed out once free ones have run out."""
        return sum(pool.num_cached for pool in self._memory.pools)

    @property
    def num_used_blocks(self) -> int:
        return sum(pool.num_used for pool in self._memory.pools)

    @property
    def num_available_blocks(self) -> int:
        """Blocks that grow can still take from every group, free or cached."""
        return self._memory.num_available

    @property
    def stats(self) -> CacheStats:
        return CacheStats(
            self._num_queried_tokens,
            self._num_hit_tokens,
            self._num_evicted_blocks,
            self._num_duplicate_blocks,
            self._memory.num_copied_blocks,
        )

    def fits(self, num_tokens: int) -> bool:
        """Whether one sequence of num_tokens can be held at all, alone in the pool."""
        return self._memory.fits(num_tokens)

    # One sequence's life

    def match(self, tokens: np.ndarray, salt: bytes = b"") -> int:
        """Tokens that admit would take from the cache now. Takes nothing, counts nothing."""
        if not self._prefix_cache:
            return 0
        root = self._index.root(salt)
        _, num_hit = self._find_prefix(root, tokens)
        self._index.drop(root)
        return num_hit * self.block_size

    def can_admit(
        self, tokens: np.ndarray, *, salt: bytes = b"", use_cache: bool = True, headroom: int = 0
    ) -> bool:
        """Whether admit and then grow to len(tokens) would succeed and leave `headroom` blocks available."""
        num_needed = -(-len(tokens) // self.block_size) + headroom
        num_shareable = self._num_shareable(tokens) if self._prefix_cache and use_cache else 0
        if num_needed - num_shareable > self.num_available_blocks:
            return False  # even if all that can be cached is, and in use
        if num_shareable == 0:
            return True
        root = self._index.root(salt)
        nodes, num_hit = self._find_prefix(root, tokens)
        num_revived = self._memory.num_cached_among(self._index.blocks(nodes[:num_hit]))
        self._index.drop(root)
        return all(
            num_needed - num_hit + revived <= pool.num_available
            for pool, revived in zip(self._memory.pools, num_revived)
        )

    def admit(self, slot: int, tokens: np.ndarray, *, salt: bytes = b"", use_cache: bool = True) -> int:
        """Starts a sequence in an empty slot with the cached part of `tokens` (i32, all known tokens); returns the
        number of tokens whose KV is there: whole blocks, and never the last token, whose logits someone wants.

        use_cache=False reads nothing from the cache; what the sequence computes becomes findable all the same.
        """
        self._memory.occupy(slot)
        if not self._prefix_cache:
            return 0
        node = self._index.root(salt)
        num_hit = 0
        if use_cache:
            nodes, num_hit = self._find_prefix(node, tokens)
            self._num_queried_tokens += len(tokens)
            self._num_hit_tokens += num_hit * self.block_size
        if num_hit:
            self._memory.adopt(slot, self._index.blocks(nodes[:num_hit]))
            self._index.hold(nodes[num_hit - 1])
            self._index.drop(node)
            node = nodes[num_hit - 1]
        self._stand(slot, node, num_hit)
        return num_hit * self.block_size

    def fits(self, num_tokens: int) -> bool:
        """Whether one sequence of that many tokens, alone, can ever be held."""
        num_blocks = -(-num_tokens // self.block_size)
        return num_blocks <= min(self._memory.max_blocks_per_seq, *(pool.num_usable for pool in self._memory.pools))

    def can_admit(
        self, tokens: np.ndarray, *, salt: bytes = b"", use_cache: bool = True, headroom: int = 0
    ) -> bool:
        """Whether admit and grow to len(tokens) would work now and leave `headroom` blocks to hand out."""
        num_blocks = -(-len(tokens) // self.block_size)
        if num_blocks + headroom <= self.num_available_blocks:
            return True  # also without a hit
        if not (use_cache and self._prefix_cache):
            return False
        root = self._index.root(salt)
        nodes, num_hit = self._find_prefix(root, tokens)
        blocks = self._index.blocks(nodes[:num_hit])
        self._index.drop(root)
        # A hit that another sequence holds costs nothing; one that nobody holds is taken out of what is available.
        held = [np.count_nonzero(pool.num_owners[blocks[group]] > 0) for group, pool in enumerate(self._memory.pools)]
        return all(num_blocks - held + headroom <= pool.num_available for held, pool in zip(held, self._memory.pools))

    def num_new_blocks(self, slot: int, num_tokens: int) -> int:
        """Blocks that grow would take from each group's pool: new ones, and the copy of a shared last block."""
        return self._memory.num_new_blocks(slot, num_tokens)

    def can_grow(self, slot: int, num_tokens: int) -> bool:
        return self._memory.can_grow(slot, num_tokens)

    def grow(self, slot: int, num_tokens: int) -> bool:
        """Blocks for num_tokens in total, ready to be written behind what is computed; all or nothing.

        To be called before every step that writes: it also replaces a last block that a fork shares by a copy.
        """
        return self._memory.grow(slot, num_tokens)

    def grow_each(self, slots: np.ndarray, num_tokens: np.ndarray) -> int:
        """grow for each slot (distinct) in order, up to the first that does not fit; returns how many fitted."""
        return self._memory.grow_each(slots, num_tokens)

    def take_copies(self) -> list[tuple[int, int, int]]:
        """(group, source, destination) block copies to run before the next step's writes, in any order or all at
        once: no destination is a source of another, and none occurs twice."""
        return self._memory.take_copies()

    def commit(self, slot: int, tokens: np.ndarray, num_computed: int) -> None:
        """The KV of the first num_computed of `tokens` is in the blocks; full ones are findable from now on.

        Where a prefix is registered already its first block stays the findable one; the sequence keeps its own.
        """
        self._memory.num_computed[slot] = num_computed
        if num_computed >= self._next_border[slot]:
            self._register(slot, tokens, num_computed)

    def commit_each(
        self, slots: np.ndarray, tokens: Sequence[np.ndarray] | Mapping[int, np.ndarray], num_computed: np.ndarray
    ) -> None:
        """commit for each slot; tokens[slot] are that slot's (a 2-D array, or any sequence or dict of rows)."""
        self._memory.num_computed[slots] = num_computed
        for place in np.flatnonzero(num_computed >= self._next_border[slots]).tolist():
            slot = int(slots[place])
            self._register(slot, tokens[slot], int(num_computed[place]))

    def fork(self, parent: int, child: int, num_tokens: int) -> None:
        """Starts a sequence in the empty slot `child` that shares the blocks of the parent's first num_tokens
        computed tokens. Costs no block; a partial last block is copied when one of its owners grows."""
        self._memory.fork(parent, child, num_tokens)
        node = self._node[parent]
        if node is None:
            return
        num_registered = min(int(self._num_registered[parent]), num_tokens // self.block_size)
        for _ in range(int(self._num_registered[parent]) - num_registered):
            node = self._index.parent(node)
        self._index.hold(node)
        self._stand(child, node, num_registered)
        self._has_duplicates[child] = self._has_duplicates[parent]

    def release_behind_window(self, slots: np.ndarray, num_computed: np.ndarray) -> None:
        """Gives back blocks that no query at position num_computed or later can see; their table entries become 0.
        Call commit first: what is not registered by then cannot be found later."""
        self._memory.release_behind_window(slots, num_computed)

    def free(self, slot: int) -> None:
        """Ends the sequence. Its findable blocks stay so until reused, the tail of a chain before its head."""
        node = self._node[slot]
        if node is not None:
            if self._has_duplicates[slot]:
                self._offer_duplicates(slot, node)
            self._index.drop(node)
        self._memory.free(slot)
        self._node[slot] = None
        self._num_registered[slot] = 0
        self._next_border[slot] = _NEVER
        self._has_duplicates[slot] = False

    # Host memory. Order on the device: saves, loads, copies, then the step.

    def swap_out(self, slots: Sequence[int]) -> SwappedBlocks | None:
        """Moves sequences to host memory and frees their slots; what they share is saved once. None, and nothing
        changed, where the host has no room, no swapping is configured, or they were swapped in since the last step."""
        if self._swap is None:
            return None
        standing = [(self._node[slot], int(self._num_registered[slot])) for slot in slots]
        swapped = self._swap.save(slots, standing)
        if swapped is None:
            return None
        for node, _ in standing:
            if node is not None:
                self._index.hold(node)
                self._swapped_nodes.append(node)
        for slot in slots:
            self.free(slot)
        return swapped

    def swap_in(self, slots: Sequence[int], swapped: SwappedBlocks) -> bool:
        """Brings the sequences back into empty slots, in the order they left; all or nothing. Blocks that the prefix
        cache still finds are shared, the others loaded. The host blocks stay taken until release_swapped."""
        chains = [self._index.path(row.node, row.num_registered) for row in swapped.rows]
        if not self._swap.restore(slots, swapped, [self._index.blocks(chain) for chain in chains]):
            return False
        for slot, row in zip(slots, swapped.rows):
            if row.node is not None:
                self._index.hold(row.node)
                self._stand(slot, row.node, row.num_registered)
                self._has_duplicates[slot] = True
                self._offer_duplicates(slot, row.node)
        return True

    def release_swapped(self, swapped: SwappedBlocks) -> None:
        """Gives up the host blocks: after an abort, or once the loads of swap_in have run. Once each."""
        self._swap.release(swapped)
        for row in swapped.rows:
            if row.node is not None:
                self._swapped_nodes.remove(row.node)
                self._index.drop(row.node)

    def take_saves(self) -> list[tuple[int, int, int]]:
        """(group, device block, host block) copies to run first of all."""
        return [] if self._swap is None else self._swap.take_saves()

    def take_loads(self) -> list[tuple[int, int, int]]:
        """(group, host block, device block) copies to run after the saves and before the block copies."""
        return self._memory.take_loads()

    def flush(self) -> int:
        """Forgets what is cached and has no owner; returns how many blocks that were."""
        self._index.forget_last_match()
        num_forgotten = 0
        for group, pool in enumerate(self._memory.pools):
            blocks = pool.forget_cached()
            self._memory.cancel_due(group, blocks)
            num_forgotten += len(blocks)
            for block in blocks:
                self._index.evict(group, block)
        return num_forgotten

    def unused_blocks(self) -> tuple[np.ndarray, ...]:
        """Per group: blocks that hold nothing. A debugging engine overwrites them after the copies of a step with a
        large finite value, so that a read of one shows."""
        return tuple(pool.free_blocks() for pool in self._memory.pools)

    def check_integrity(self) -> list[str]:
        """Violated invariants in words; empty when sound. For tests and Control.CheckIntegrity: looks at everything."""
        problems = self._memory.check() + self._index.check(
            [node for node in self._node if node is not None] + self._swapped_nodes
        )
        for group, pool in enumerate(self._memory.pools):
            if set(np.flatnonzero(pool.findable).tolist()) != set(self._index.findable_blocks(group)):
                problems.append(f"group {group}: the findable blocks of pool and index differ")
        return problems

    # Prefix cache

    def _num_shareable(self, tokens: np.ndarray) -> int:
        """Full blocks that leave at least the last token to compute."""
        return min(max(len(tokens) - 1, 0) // self.block_size, self._memory.max_blocks_per_seq)

    def _find_prefix(self, root: int, tokens: np.ndarray) -> tuple[list[int], int]:
        nodes = self._index.match(root, tokens, self._num_shareable(tokens))
        return nodes, combined_hit(self._index.blocks(nodes) != 0, self._memory.groups, self.block_size)

    def _stand(self, slot: int, node: int, num_registered: int) -> None:
        """The slot holds `node`, num_registered blocks from the root."""
        self._node[slot] = node
        self._num_registered[slot] = num_registered
        self._next_border[slot] = (num_registered + 1) * self.block_size

    def _register(self, slot: int, tokens: np.ndarray, num_computed: int) -> None:
        start = node = self._node[slot]
        first, last = int(self._num_registered[slot]), num_computed // self.block_size
        size = 4 * self.block_size
        data = np.ascontiguousarray(tokens[first * self.block_size : last * self.block_size], np.int32).tobytes()
        block_rows = np.stack([table[slot, first:last] for table in self.tables], axis=1).tolist()
        collided = False
        for place, blocks in enumerate(block_rows):
            registered = self._index.register(node, data[place * size : (place + 1) * size], blocks)
            if registered is None:
                collided = True
                break
            node, filled = registered
            for group in filled:
                self._memory.pools[group].findable[blocks[group]] = True
            if len(filled) < len(blocks) - blocks.count(0):
                self._has_duplicates[slot] = True
                self._num_duplicate_blocks += 1
        self._index.hold(node)
        self._index.drop(start)
        self._stand(slot, node, last)
        if collided:  # what comes behind this block cannot be found; the sequence no longer takes part
            self._index.drop(node)
            self._node[slot] = None
            self._num_registered[slot] = 0
            self._next_border[slot] = _NEVER

    def _offer_duplicates(self, slot: int, node: int | None) -> None:
        """Makes the slot's own copies findable where the first ones are gone by now."""
        for index in range(int(self._num_registered[slot]) - 1, -1, -1):
            blocks = [int(table[slot, index]) for table in self.tables]
            for group in self._index.fill(node, blocks):
                self._memory.pools[group].findable[blocks[group]] = True
            node = self._index.parent(node)

    def _forget(self, group: int, blocks: list[int]) -> None:
        self._num_evicted_blocks += len(blocks)
        for block in blocks:
            self._index.evict(group, block)
