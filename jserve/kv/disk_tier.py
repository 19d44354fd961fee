"""A store of files as a tier of the prefix cache, below host memory: which block of which prefix is read or written.

A block is found by the key of its whole prefix, and is believed only where the prefix itself, stored beside it, is the
one that was asked for: a colliding key gives no foreign KV.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jserve.kv.block_keys import KeyChain, encode_fields
from jserve.kv.host_tier import HostTier
from jserve.kv.prefix_index import PrefixIndex


@dataclass(frozen=True)
class Transfer:
    """A copy between a host block and the store."""

    group: int
    host_block: int


class BlockStore(Protocol):
    """Named blocks outside of this process; threads of its own copy them. Fails by not having a block, never louder."""

    def holds(self, name: str) -> bool: ...

    def put(self, name: str, label: bytes, transfer: Transfer) -> None:
        """Starts to write a host block; `take_done` says when the store is done with it, written or not."""

    def get(self, name: str, label: bytes, transfer: Transfer) -> None:
        """Starts to read a block that has exactly this label into a host block."""

    def take_done(self) -> list[tuple[Transfer, bool]]:
        """Transfers that are done since the last time, and whether the copy was made."""

    def flush(self) -> None:
        """Forgets every block, also those that are being written."""

    def check(self) -> list[str]:
        """Violated invariants, in words."""


MOST_WRITING = 32
"""Host blocks that are being written at once; swapping has to do without them."""


class DiskTier:
    """Invariant: a host block that a transfer reads or writes has an owner for it; a node that is read is held."""

    def __init__(self, index: PrefixIndex, host: HostTier, store: BlockStore, chain: KeyChain):
        self._index = index
        self._host = host
        self._store = store
        self._chain = chain
        self._writing: set[Transfer] = set()
        self._reading: dict[Transfer, int] = {}  # -> node
        self._awaited: dict[tuple[int, int], Transfer] = {}  # (group, node) -> of _reading, but for those flushed since
        self._backlog: deque[tuple[int, int, int]] = deque(maxlen=sum(pool.num_usable for pool in host.pools))
        """(group, node, host block) that are written later, if they are still there."""
        self._most_writing = max(1, min(MOST_WRITING, min(pool.num_usable for pool in host.pools) // 4))
        self.num_saved_blocks = self.num_loaded_blocks = 0

    # The tier

    def lookup(self, group: int, node: int) -> bool:
        return self._store.holds(self._name(group, self._index.key(node, self._chain)))

    def save(self, group: int, nodes: Sequence[int], blocks: Sequence[int]) -> None:
        """blocks: in host memory. Written later where too many are being written now."""
        self._backlog.extend((group, node, block) for node, block in zip(nodes, blocks))
        self._write_some()

    def load(self, group: int, node: int) -> bool:
        """Into host memory: once `poll` has heard of it, and the copy was made, the host tier has it."""
        if (group, node) in self._awaited:
            return True
        if not self._host.pools[group].num_available:
            return False
        transfer = Transfer(group, self._host.take(group))
        self._index.hold(node)
        self._reading[transfer] = node
        self._awaited[group, node] = transfer
        self._store.get(self._name(group, self._index.key(node, self._chain)), self._label(group, node), transfer)
        return True

    # Copies

    def is_loading(self, group: int, node: int) -> bool:
        return (group, node) in self._awaited

    def extend(self, node: int, tokens: bytes) -> Iterator[int]:
        """Nodes of the blocks of `tokens` (i32, full blocks) behind `node` that the store holds for some layer group.
        The nodes are in the index as long as the last one is held."""
        key, size = self._index.key(node, self._chain), 4 * self._chain.block_size
        for start in range(0, len(tokens), size):
            piece = tokens[start : start + size]
            key = self._chain.step(key, piece)
            if not any(self._store.holds(self._name(group, key)) for group in range(len(self._host.pools))):
                return
            registered = self._index.register(node, piece, ())
            if registered is None:
                return
            node = registered[0]
            yield node

    def poll(self) -> None:
        """Takes in what the store has done."""
        for transfer, copied in self._store.take_done():
            group, host_block = transfer.group, transfer.host_block
            if transfer in self._writing:
                self._writing.remove(transfer)
                self.num_saved_blocks += copied
                self._host.release(group, host_block)
                continue
            node = self._reading.pop(transfer)
            wanted = self._awaited.get((group, node)) == transfer
            if wanted:
                del self._awaited[group, node]
            if copied and wanted and not self._host.lookup(group, node):
                self._host.keep(group, node, host_block)
                self.num_loaded_blocks += 1
            self._host.release(group, host_block)
            self._index.drop(node)
        self._write_some()

    def _write_some(self) -> None:
        while self._backlog and len(self._writing) < self._most_writing:
            group, node, host_block = self._backlog.popleft()
            if not self._host.has(group, node, host_block):
                continue
            name = self._name(group, self._index.key(node, self._chain))
            if not self._store.holds(name):
                transfer = Transfer(group, host_block)
                self._host.share(group, host_block)
                self._writing.add(transfer)
                self._store.put(name, self._label(group, node), transfer)

    @property
    def num_writes_left(self) -> int:
        """Under way, or to be started once others are done."""
        return len(self._writing) + len(self._backlog)

    def flush(self) -> None:
        self._awaited.clear()
        self._backlog.clear()
        self._store.flush()

    def held_nodes(self) -> list[int]:
        return list(self._reading.values())

    def owners(self) -> list[np.ndarray]:
        """Per group: owners of each host block that are transfers."""
        owners = [np.zeros(pool.num_blocks, np.int32) for pool in self._host.pools]
        for transfer in [*self._writing, *self._reading]:
            owners[transfer.group][transfer.host_block] += 1
        return owners

    def check(self) -> list[str]:
        lost: Sequence[Transfer] = [one for one in self._awaited.values() if one not in self._reading]
        return self._store.check() + [f"a block is awaited that nobody reads: {one}" for one in lost]

    def _name(self, group: int, key: bytes) -> str:
        return f"{key.hex()}-{group}"

    def _label(self, group: int, node: int) -> bytes:
        """All that the block's content depends on."""
        salt, tokens = self._index.prefix(node)
        return encode_fields(
            "block", root=self._chain.root, salt=salt, block_size=self._chain.block_size, group=group, tokens=tokens
        )
