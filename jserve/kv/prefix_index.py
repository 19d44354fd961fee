"""Which blocks hold which prefix: match, register, evict.

A tree with one node per block-sized piece of a prefix. A node names the block that holds it in each column: one for
each layer group on the device, and one for each in host memory (or none: a node stays as long as something below it is
cached, or a running sequence stands on it). How a child is found is a lookup of its own, by chained hash or by exact
tokens (lookups).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jserve.kv.block_keys import KeyChain
from jserve.kv.lookups import Lookup

NO_BLOCK = 0
"""A column that holds no block for a node (the dead block's id)."""


class PrefixIndex:
    """Invariant: each node's parent is in the index; each node is in use: it has a block, a child or a holder."""

    def __init__(self, num_columns: int, block_size: int, lookup: Lookup):
        self._bytes_per_block = 4 * block_size
        self._lookup = lookup
        self._roots: dict[bytes, int] = {}
        self._salts: dict[int, bytes] = {}
        # One entry per node id, as lists of plain values: nothing here for the garbage collector to walk.
        self._parent: list[int | None] = []
        self._tokens: list[bytes] = []
        self._key: list[bytes | None] = []  # made when somebody asks
        self._num_uses: list[int] = []  # children + holders + blocks
        self._block: tuple[list[int], ...] = tuple([] for _ in range(num_columns))
        self._node_of: tuple[dict[int, int], ...] = tuple({} for _ in range(num_columns))
        self._unused_ids: list[int] = []
        self._last_match: _LastMatch | None = None

    def root(self, salt: bytes) -> int:
        """The empty prefix of all sequences with this salt, held once more for the caller."""
        root = self._roots.get(salt)
        if root is None:
            root = self._new_node(None, b"")
            self._roots[salt] = root
            self._salts[root] = salt
            self._lookup.add_root(root, salt)
        self._num_uses[root] += 1
        return root

    def hold(self, node: int) -> None:
        """Keeps `node` in the index, with or without blocks, until it is dropped as often."""
        self._num_uses[node] += 1

    def drop(self, node: int) -> None:
        self._end_use(node)

    def match(self, root: int, tokens: np.ndarray, max_blocks: int) -> list[int]:
        """Nodes of the longest known prefix of `tokens` (i32), at most max_blocks; some may hold no block.

        The last answer is kept, its nodes held: who asks again (the head of a waiting queue, at every step) pays for
        what became known since, not for the whole prefix.
        """
        size, find = self._bytes_per_block, self._lookup.find
        data = np.ascontiguousarray(tokens[: max_blocks * size // 4], np.int32).tobytes()
        last = self._last_match
        nodes = last.nodes if last is not None and last.root == root and last.data == data else []
        nodes = nodes.copy()
        node = nodes[-1] if nodes else root
        for start in range(len(nodes) * size, len(data), size):
            child = find(node, data[start : start + size])
            if child is None:
                break
            nodes.append(child)
            node = child
        self.hold(node)
        self.forget_last_match()
        self._last_match = _LastMatch(root, data, nodes)
        return nodes.copy()

    def forget_last_match(self) -> None:
        last, self._last_match = self._last_match, None
        if last is not None:
            self.drop(last.deepest)

    def blocks(self, nodes: Sequence[int]) -> np.ndarray:
        """i32[columns, nodes]: the block of each node in each column, or NO_BLOCK."""
        return np.array([[block[node] for node in nodes] for block in self._block], np.int32)

    def register(self, parent: int, tokens: bytes, blocks: Sequence[int]) -> tuple[int, list[int]] | None:
        """Makes a full block findable: `blocks` (of the first columns, or NO_BLOCK) hold `tokens` behind `parent`.

        Where a column already has a block for this prefix the first one stays. Returns the node and the columns that
        took the given block; None where the lookup cannot hold the prefix (a colliding hash): it stays unknown.
        """
        next_id = self._unused_ids[-1] if self._unused_ids else len(self._parent)
        node = self._lookup.claim(parent, tokens, next_id)
        if node is None:
            return None
        if node == next_id:
            self._new_node(parent, tokens)
            self._num_uses[parent] += 1
        return node, self.fill(node, blocks)

    def fill(self, node: int, blocks: Sequence[int]) -> list[int]:
        """Gives `node` the given block in each of the first columns where it has none; returns those columns."""
        return [column for column, block in enumerate(blocks) if block != NO_BLOCK and self.place(column, node, block)]

    def place(self, column: int, node: int, block: int) -> bool:
        """Gives `node` a block in one column; False where it has one."""
        if self._block[column][node] != NO_BLOCK:
            return False
        self._block[column][node] = block
        self._node_of[column][block] = node
        self._num_uses[node] += 1
        return True

    def block(self, column: int, node: int) -> int:
        """The node's block there, or NO_BLOCK."""
        return self._block[column][node]

    def node_at(self, column: int, block: int) -> int | None:
        """Whose content a findable block holds."""
        return self._node_of[column].get(block)

    def evict(self, column: int, block: int) -> None:
        """Forgets what `block` holds."""
        node = self._node_of[column].pop(block)
        self._block[column][node] = NO_BLOCK
        self._end_use(node)

    def path(self, node: int | None, length: int) -> list[int]:
        """The last `length` nodes from the root's side down to `node`."""
        nodes = []
        for _ in range(length):
            nodes.append(node)
            node = self._parent[node]
        return nodes[::-1]

    def parent(self, node: int) -> int | None:
        return self._parent[node]

    def prefix(self, node: int) -> tuple[bytes, bytes]:
        """Salt and tokens (i32) of the whole prefix that ends with `node`."""
        pieces = []
        while (parent := self._parent[node]) is not None:
            pieces.append(self._tokens[node])
            node = parent
        return self._salts[node], b"".join(reversed(pieces))

    def key(self, node: int, chain: KeyChain) -> bytes:
        """Of the whole prefix that ends with `node`; always the same `chain`, as keys are kept."""
        missing = []
        while self._key[node] is None and self._parent[node] is not None:
            missing.append(node)
            node = self._parent[node]
        key = self._key[node]
        if key is None:
            key = self._key[node] = chain.start(self._salts[node])
        for node in reversed(missing):
            key = self._key[node] = chain.step(key, self._tokens[node])
        return key

    @property
    def num_nodes(self) -> int:
        return len(self._parent) - len(self._unused_ids)

    def findable_blocks(self, column: int) -> list[int]:
        return list(self._node_of[column])

    def check(self, holders: Iterable[int]) -> list[str]:
        """Violations of the class invariant, in words; holders: every node that is held, once for each hold."""
        problems = []
        unused = set(self._unused_ids)
        num_uses = Counter(holders)
        if self._last_match is not None:
            num_uses[self._last_match.deepest] += 1
        for node, parent in enumerate(self._parent):
            if node in unused:
                continue
            num_uses[node] += sum(block[node] != NO_BLOCK for block in self._block)
            if parent is None:
                continue
            num_uses[parent] += 1
            if parent in unused:
                problems.append(f"index node {node} hangs on node {parent}, which is gone")
            elif self._lookup.find(parent, self._tokens[node]) != node:
                problems.append(f"index node {node} is not found under its own tokens")
        for node, count in enumerate(self._num_uses):
            if node not in unused and (count != num_uses[node] or count == 0):
                problems.append(f"index node {node} counts {count} uses, has {num_uses[node]}")
        for column, node_of in enumerate(self._node_of):
            for block, node in node_of.items():
                if node in unused or self._block[column][node] != block:
                    problems.append(f"column {column}: block {block} and index node {node} disagree")
        return problems

    def _new_node(self, parent: int | None, tokens: bytes) -> int:
        if self._unused_ids:
            node = self._unused_ids.pop()
            self._parent[node], self._tokens[node], self._num_uses[node] = parent, tokens, 0
            self._key[node] = None
            return node
        self._parent.append(parent)
        self._tokens.append(tokens)
        self._key.append(None)
        self._num_uses.append(0)
        for block in self._block:
            block.append(NO_BLOCK)
        return len(self._parent) - 1

    def _end_use(self, node: int) -> None:
        self._num_uses[node] -= 1
        while self._num_uses[node] == 0:
            parent = self._parent[node]
            if parent is None:
                del self._roots[self._salts.pop(node)]
                self._unused_ids.append(node)
                return
            self._parent[node] = None
            self._lookup.remove(parent, self._tokens[node], node)
            self._tokens[node] = b""
            self._unused_ids.append(node)
            self._num_uses[parent] -= 1
            node = parent


@dataclass(frozen=True)
class _LastMatch:
    root: int
    data: bytes
    nodes: list[int]

    @property
    def deepest(self) -> int:
        return self.nodes[-1] if self.nodes else self.root
