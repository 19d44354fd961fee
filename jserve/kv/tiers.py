"""The tiers below the device together: host memory, perhaps a disk below it, and what is on its way back from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jserve.kv.block_keys import KeyChain
from jserve.kv.block_tables import BlockTables
from jserve.kv.disk_tier import BlockStore, DiskTier
from jserve.kv.fetches import Fetch, Fetcher
from jserve.kv.host_tier import Copy, HostTier
from jserve.kv.prefix_cache import PrefixCache
from jserve.kv.prefix_index import PrefixIndex
from jserve.kv.swap import HostSwap


@dataclass(frozen=True)
class TierStats:
    """Counters since the start."""

    num_host_hit_tokens: int = 0
    num_disk_hit_tokens: int = 0
    """Tokens of prefixes that came back; found tokens once somebody enters with them."""
    num_host_saved_blocks: int = 0
    num_host_loaded_blocks: int = 0
    """Moved between device and host memory, in steps."""
    num_disk_saved_blocks: int = 0
    num_disk_loaded_blocks: int = 0
    """Moved between host memory and disk."""
    num_host_cached_blocks: int = 0
    """Not a counter: blocks of host memory in which something is found now."""


class Tiers:
    """What the scheduler asks of them, once a step or once a sequence."""

    def __init__(
        self,
        memory: BlockTables,
        index: PrefixIndex,
        cache: PrefixCache,
        swap: HostSwap,
        store: BlockStore | None,
        chain: KeyChain,
    ):
        """index: with a column for each layer group on the device, and then one for each in host memory."""
        self._host = HostTier(memory, index, swap.pools)
        self._disk = None if store is None else DiskTier(index, self._host, store, chain)
        self._fetcher = Fetcher(memory, index, cache, self._host, self._disk)
        cache.on_evict = self._host.save
        swap.on_evict = self._host.forget
        if self._disk is not None:
            self._host.on_arrival = self._disk.save

    # A sequence that is about to enter

    def begin_fetch(self, tokens: np.ndarray, salt: bytes = b"") -> Fetch | None:
        """Starts to bring back what is known of `tokens` here and not on the device; None where that is nothing. Each
        fetch is to be ended."""
        return self._fetcher.begin(tokens, salt)

    def advance_fetch(self, fetch: Fetch, most: int) -> bool:
        """Starts up to `most` copies to the device; True once nothing more will come: BlockManager.admit finds it."""
        return self._fetcher.advance(fetch, most)

    def end_fetch(self, fetch: Fetch) -> None:
        self._fetcher.end(fetch)

    @property
    def num_loads_due(self) -> int:
        """Copies to the device that the next step makes."""
        return self._host.num_loads_due

    @property
    def has_disk(self) -> bool:
        return self._disk is not None

    # A step

    def poll(self) -> None:
        """Between a step's launch and the next one's planning: takes in which copies are done."""
        self._host.release_loaded()
        if self._disk is not None:
            self._disk.poll()

    def take_saves(self) -> list[Copy]:
        return self._host.take_saves()

    def loads_taken(self, loads: Sequence[Copy]) -> None:
        self._host.loads_taken(loads)

    def saves_arrived(self, saves: Sequence[Copy]) -> None:
        self._host.arrived(saves)

    # The end, and looking in

    def save_cached(self) -> None:
        """Starts to save what only the device has cached, as far as there is room."""
        self._host.save_cached()

    @property
    def num_disk_writes_left(self) -> int:
        return 0 if self._disk is None else self._disk.num_writes_left

    def flush(self) -> None:
        self._host.flush()
        if self._disk is not None:
            self._disk.flush()

    def forget_copies(self) -> None:
        """The device is gone. The disk keeps what it has."""
        self._host.forget_copies()

    @property
    def stats(self) -> TierStats:
        host, disk, fetcher = self._host, self._disk, self._fetcher
        return TierStats(
            fetcher.num_host_hit_tokens,
            fetcher.num_disk_hit_tokens,
            host.num_saved_blocks,
            host.num_loaded_blocks,
            0 if disk is None else disk.num_saved_blocks,
            0 if disk is None else disk.num_loaded_blocks,
            host.num_cached_blocks,
        )

    def held_nodes(self) -> list[int]:
        """Nodes of the index that are held, once for each hold."""
        return self._fetcher.held_nodes() + ([] if self._disk is None else self._disk.held_nodes())

    def check(self, swap_owners: Sequence[np.ndarray]) -> list[str]:
        """Violations in words. swap_owners: per group, the owners of each host block that are swapped sequences."""
        if self._disk is None:
            return self._host.check(swap_owners)
        owners = [mine + theirs for mine, theirs in zip(self._disk.owners(), swap_owners)]
        return self._host.check(owners) + self._disk.check()
