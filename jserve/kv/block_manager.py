"""KV memory of all running sequences: admit, grow, commit, fork, free, over block tables and a prefix cache.

The scheduler calls it once a step. Knows slots, token ids and block ids; never an array on the device, a request or
a policy. What it decides about the device, block copies, it hands out through take_copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jserve.kv.block_keys import HashBlock, KeyChain, hash_block as chain_hash
from jserve.kv.block_tables import BlockTables
from jserve.kv.disk_tier import BlockStore
from jserve.kv.groups import GroupSpec
from jserve.kv.integrity import host_violations, table_violations
from jserve.kv.lookups import HashLookup, Lookup, TreeLookup
from jserve.kv.prefix_cache import PrefixCache
from jserve.kv.prefix_index import PrefixIndex
from jserve.kv.swap import HostSwap, SwappedBlocks
from jserve.kv.tiers import Tiers, TierStats


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
        index: str = "radix",
        hash_block: HashBlock | None = None,
        num_host_blocks: Sequence[int] | None = None,
        host_tier: bool = False,
        disk: BlockStore | None = None,
    ):
        """num_blocks: per group, the dead block included. index: "radix" or "hash" (lookups says how they differ); only
        the hash uses root_key, all that changes KV (block_keys.root_key), and hash_block, its hash function.
        num_host_blocks: host memory to swap to, per group, block 0 (never used) included; None: no swapping.
        host_tier: cached blocks that the device reuses move to what of it is free. disk: and from there to this store,
        which needs root_key (and hash_block) too."""
        if len(groups) != len(num_blocks) or not groups:
            raise ValueError(f"{len(groups)} groups, but num_blocks for {len(num_blocks)}")
        has_tiers = host_tier and prefix_cache and num_host_blocks is not None
        if disk is not None and not has_tiers:
            raise ValueError("disk is given, but no host tier for what comes from there")
        if hash_block is not None and index == "radix" and disk is None:
            raise ValueError("hash_block is given, but index 'radix' hashes nothing")
        lookup = _make_lookup(index, root_key, block_size, hash_block)
        prefixes = PrefixIndex((1 + has_tiers) * len(groups), block_size, lookup)
        self.block_size = block_size
        self._memory = BlockTables(groups, num_blocks, block_size, num_slots, max_blocks_per_seq)
        self._cache = PrefixCache(self._memory, prefixes, num_slots, prefix_cache)
        self._memory.on_evict = self._cache.forget
        self._swap = None if num_host_blocks is None else HostSwap(self._memory, num_host_blocks)
        self.tiers: Tiers | None = None
        """What lies below the device for the prefix cache, if anything does."""
        if has_tiers:
            chain = KeyChain(root_key, block_size, hash_block or chain_hash)
            self.tiers = Tiers(self._memory, prefixes, self._cache, self._swap, disk, chain)
        self._known_unused = [np.zeros(count, bool) for count in num_blocks]
        self.tables = self._memory.tables
        self.has_windows = self._memory.has_windows
        """Some group gives back blocks while a sequence runs: blocks are then to be taken step by step."""
        self._num_queried_tokens = self._num_hit_tokens = 0

    # What there is

    @property
    def num_total_blocks(self) -> int:
        """Usable blocks of all groups: free + cached + used."""
        return sum(pool.num_usable for pool in self._memory.pools)

    @property
    def has_prefix_cache(self) -> bool:
        return self._cache.enabled

    @property
    def num_groups(self) -> int:
        """Layer groups, each with a pool of its own."""
        return len(self._memory.pools)

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
            self._cache.num_evicted_blocks,
            self._cache.num_duplicate_blocks,
            self._memory.num_copied_blocks,
        )

    @property
    def tier_stats(self) -> TierStats:
        return TierStats() if self.tiers is None else self.tiers.stats

    @property
    def num_saved_blocks(self) -> int:
        """Blocks that the running sequences would need on top of the used ones if nothing were shared."""
        return self._memory.num_entries - self.num_used_blocks

    def expect_steps(self, step_tokens: int) -> None:
        """Most tokens by which a sequence grows between two calls of release_behind_window."""
        self._memory.step_tokens = step_tokens

    def num_wanted(self, num_tokens: int) -> int:
        """Most blocks of one group that a sequence of num_tokens has at once."""
        return int(self._memory.num_wanted(-(-num_tokens // self.block_size)).max())

    def has_room(self, num_blocks: int, num_sequences: int = 1, headroom: int = 0) -> bool:
        """Whether every group can hand out num_blocks to num_sequences, and headroom more, beyond what is promised."""
        wanted = self._memory.num_wanted(num_blocks, num_sequences)
        return bool((wanted + headroom <= self._memory.num_unpromised).all())

    def fits_blocks(self, num_blocks: int, num_sequences: int) -> bool:
        """Whether num_sequences can hold num_blocks between them, alone in the pools."""
        wanted = self._memory.num_wanted(num_blocks, num_sequences)
        return all(count <= pool.num_usable for count, pool in zip(wanted, self._memory.pools))

    def fits(self, num_tokens: int, step_tokens: int | None = None) -> bool:
        """Whether one sequence of num_tokens can be held at all, alone in the pool. step_tokens: it grows by so many
        at a time, release_behind_window between, so that a window group never holds all of it."""
        return self._memory.fits(num_tokens, step_tokens)

    # One sequence's life

    def match(self, tokens: np.ndarray, salt: bytes = b"") -> int:
        """Tokens that admit would take from the cache now. Takes nothing, counts nothing."""
        return self._cache.find(tokens, salt).shape[1] * self.block_size

    def can_admit(
        self,
        tokens: np.ndarray,
        *,
        salt: bytes = b"",
        use_cache: bool = True,
        headroom: int = 0,
        step_tokens: int | None = None,
    ) -> bool:
        """Whether admit and grow would work now and leave `headroom` blocks to hand out; grow to len(tokens), or by
        step_tokens where given. Where expect_steps was called, a window group needs no more than it has at once."""
        num_blocks = -(-len(tokens) // self.block_size)
        most = num_blocks if step_tokens is None else min(-(-step_tokens // self.block_size), num_blocks)
        wanted = self._memory.num_wanted(num_blocks)
        to_spare = self._memory.num_unpromised - headroom
        if (wanted <= to_spare).all():
            return True  # also without a hit
        num_unshared = num_blocks - self._cache.num_shareable(tokens) if use_cache else num_blocks
        if not use_cache or (np.minimum(wanted, min(num_unshared, most)) > to_spare).any():
            return bool((np.minimum(wanted, most) <= to_spare).all())
        found = self._cache.find(tokens, salt)
        num_new = np.minimum(wanted - self._memory.num_adopted(found), min(num_blocks - found.shape[1], most))
        return bool((num_new <= self._memory.num_available_after_adopting(found) - headroom).all())

    def admit(self, slot: int, tokens: np.ndarray, *, salt: bytes = b"", use_cache: bool = True) -> int:
        """Starts a sequence in an empty slot with the cached part of `tokens` (i32, all known tokens); returns the
        number of tokens whose KV is there: whole blocks, and never the last token, whose logits someone wants.

        use_cache=False reads nothing from the cache; what the sequence computes becomes findable all the same.
        """
        self._memory.occupy(slot)
        num_cached = self._cache.enter(slot, tokens, salt, use_cache) * self.block_size
        if use_cache:
            self._num_queried_tokens += len(tokens)
            self._num_hit_tokens += num_cached
        return num_cached

    def holds(self, slot: int) -> bool:
        """Whether a sequence has its table there."""
        return bool(self._memory.live[slot])

    def num_computed(self, slot: int) -> int:
        """Tokens of the slot whose KV is known to be in its blocks."""
        return int(self._memory.num_computed[slot])

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

    def num_growable(self, slot: int) -> int:
        """Tokens in total to which grow would work now."""
        return self._memory.num_growable(slot)

    def reserve(self, slot: int, num_tokens: int) -> bool:
        """grow, where blocks stay until the sequence ends; where windows give some back, only the promise: others leave
        room (can_admit, has_room), and the sequence grows step by step."""
        if not self.has_windows:
            return self.grow(slot, num_tokens)
        self._memory.num_expected[slot] = num_tokens
        return True

    def grow_each(self, slots: np.ndarray, num_tokens: np.ndarray) -> int:
        """grow for each slot (distinct) in order, up to the first that does not fit; returns how many fitted."""
        return self._memory.grow_each(slots, num_tokens)

    def take_copies(self) -> list[tuple[int, int, int]]:
        """(group, source, destination) block copies to run before the next step's writes: in this order, or all at
        once, every source read before any destination is written. No destination occurs twice."""
        return self._memory.take_copies()

    def commit(self, slot: int, tokens: np.ndarray, num_computed: int) -> None:
        """The KV of the first num_computed of `tokens` is in the blocks; full ones are findable from now on.

        Where a prefix is registered already its first block stays the findable one; the sequence keeps its own.
        """
        self._memory.num_computed[slot] = num_computed
        if num_computed >= self._cache.next_border[slot]:
            self._cache.register(slot, tokens, num_computed)

    def commit_each(
        self, slots: np.ndarray, tokens: Sequence[np.ndarray] | Mapping[int, np.ndarray], num_computed: np.ndarray
    ) -> None:
        """commit for each slot; tokens[slot] are that slot's (a 2-D array, or any sequence or dict of rows)."""
        self._memory.num_computed[slots] = num_computed
        for place in np.flatnonzero(num_computed >= self._cache.next_border[slots]).tolist():
            slot = int(slots[place])
            self._cache.register(slot, tokens[slot], int(num_computed[place]))

    def can_fork(self, parent: int, num_tokens: int) -> bool:
        """Whether nothing that a fork at num_tokens sees was given back behind the parent's window."""
        return self._memory.can_fork(parent, num_tokens)

    def fork(self, parent: int, child: int, num_tokens: int) -> None:
        """Starts a sequence in the empty slot `child` that shares the blocks of the parent's first num_tokens
        computed tokens. Costs no block; a partial last block is copied when one of its owners grows."""
        self._memory.fork(parent, child, num_tokens)
        self._cache.fork(parent, child, num_tokens)

    def release_behind_window(self, slots: np.ndarray, num_computed: np.ndarray) -> None:
        """Gives back blocks that no query at position num_computed or later can see; their table entries become 0.
        Call commit first: what is not registered by then cannot be found later."""
        self._memory.release_behind_window(slots, num_computed)

    def awaits_release(self, slots: np.ndarray, num_scheduled: np.ndarray, lag: int) -> bool:
        """Whether release_behind_window, `lag` tokens before what is scheduled, will give back any block once that is
        computed."""
        late = num_scheduled > self._memory.num_computed[slots]
        return self._memory.num_releasable(slots[late], num_scheduled[late] - lag) > 0

    def free(self, slot: int) -> None:
        """Ends the sequence. Its findable blocks stay so until reused, the tail of a chain before its head."""
        self._cache.leave(slot)
        self._memory.free(slot)

    # Host memory. Order on the device: saves, block copies, loads, then the step.

    def swap_out(self, slots: Sequence[int]) -> SwappedBlocks | None:
        """Moves sequences to host memory and frees their slots; what they share is saved once. None, and nothing
        changed, where the host has no room, no swapping is configured, or they were swapped in since the last step."""
        if self._swap is None:
            return None
        if not self._swap.can_save(slots):
            return None
        swapped = self._swap.save(slots, [self._cache.hold_standing(slot) for slot in slots])
        for slot in slots:
            self.free(slot)
        return swapped

    def swap_in(self, slots: Sequence[int], swapped: SwappedBlocks) -> bool:
        """Brings the sequences back into empty slots, in the order they left; all or nothing. Blocks that the prefix
        cache still finds are shared, the others loaded. The host blocks stay taken until release_swapped."""
        resident = [self._cache.resident_blocks(row.standing) for row in swapped.rows]
        if not self._swap.restore(slots, swapped, resident):
            return False
        for slot, row in zip(slots, swapped.rows):
            self._cache.resume(slot, row.standing)
        return True

    def release_swapped(self, swapped: SwappedBlocks) -> None:
        """Gives up the host blocks: after an abort, or once the loads of swap_in have run. Once each."""
        self._swap.release(swapped)
        for row in swapped.rows:
            self._cache.drop_standing(row.standing)

    def take_saves(self) -> list[tuple[int, int, int]]:
        """(group, device block, host block) copies to run first of all; saves_arrived is to be told once they have."""
        saves = [] if self._swap is None else self._swap.take_saves()
        return saves if self.tiers is None else saves + self.tiers.take_saves()

    def take_loads(self) -> list[tuple[int, int, int]]:
        """(group, host block, device block) copies to run after the block copies. No destination occurs twice."""
        loads = self._memory.take_loads()
        if self.tiers is not None:
            self.tiers.loads_taken(loads)
        return loads

    def saves_arrived(self, saves: Sequence[tuple[int, int, int]]) -> None:
        """These copies of take_saves are in host memory."""
        if self.tiers is not None:
            self.tiers.saves_arrived(saves)

    # Housekeeping

    def flush(self) -> int:
        """Forgets what is cached and has no owner, in every tier; returns how many blocks of the device that were."""
        if self.tiers is not None:
            self.tiers.flush()
        return self._cache.flush()

    def forget_device(self) -> None:
        """The device lost what it held, also what was on its way from or to it."""
        if self.tiers is not None:
            self.tiers.forget_copies()
        self._cache.flush()

    def unused_blocks(self) -> tuple[np.ndarray, ...]:
        """Per group: blocks that hold nothing. A debugging engine overwrites them after the copies of a step with a
        large finite value, so that a read of one shows."""
        return tuple(pool.free_blocks() for pool in self._memory.pools)

    def take_newly_unused(self) -> list[tuple[int, int]]:
        """(group, block) of unused_blocks that were in use, or findable, when this was asked last."""
        newly_unused = []
        for group, (blocks, known) in enumerate(zip(self.unused_blocks(), self._known_unused)):
            is_unused = np.zeros_like(known)
            is_unused[blocks] = True
            newly_unused += [(group, block) for block in np.flatnonzero(is_unused & ~known).tolist()]
            known[:] = is_unused
        return newly_unused

    def check_integrity(self) -> list[str]:
        """Violated invariants in words; empty when sound. For tests and Control.CheckIntegrity: looks at everything."""
        problems = table_violations(self._memory)
        if self.tiers is not None:
            problems += self.tiers.check(self._swap.owners)
        elif self._swap is not None:
            problems += host_violations(self._swap.pools, self._swap.owners)
        return problems + self._cache.check([] if self.tiers is None else self.tiers.held_nodes())


def _make_lookup(index: str, root_key: bytes, block_size: int, hash_block: HashBlock | None) -> Lookup:
    if index == "hash":
        return HashLookup(root_key, block_size, hash_block or chain_hash)
    if index != "radix":
        raise ValueError(f"index is {index!r}, expected 'radix' or 'hash'")
    return TreeLookup()
