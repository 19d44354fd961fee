"""How the prefix index finds a node's child: by the chained hash of its prefix, or as an edge of a tree.

Both are exact. Measured with tools/bench_kv.py: the same hits, the tree in two thirds of the time; the hash has the
advantage that its keys name a prefix outside this process too.
"""

from __future__ import annotations

from typing import Protocol

from jserve.kv.block_keys import HashBlock, chain_start


class Lookup(Protocol):
    """Finds the child of a node by its tokens; exact: never a node with other tokens or another parent."""

    def add_root(self, root: int, salt: bytes) -> None: ...
    def find(self, parent: int, tokens: bytes) -> int | None: ...
    def claim(self, parent: int, tokens: bytes, node: int) -> int | None:
        """The child there is, or else `node`, which becomes it; None where it cannot be held beside the others."""
        ...

    def remove(self, parent: int, tokens: bytes, node: int) -> None: ...


class HashLookup:
    """By the key of the chain up to and including the block. The stored tokens and parent decide, not the key."""

    def __init__(self, root_key: bytes, block_size: int, hash_block: HashBlock):
        self._root_key = root_key
        self._block_size = block_size
        self._hash_block = hash_block
        self._key: dict[int, bytes] = {}
        self._node: dict[bytes, tuple[int, int, bytes]] = {}  # key -> node, parent, tokens

    def add_root(self, root: int, salt: bytes) -> None:
        self._key[root] = chain_start(self._root_key, salt, self._block_size)

    def find(self, parent: int, tokens: bytes) -> int | None:
        known = self._node.get(self._hash_block(self._key[parent], tokens))
        if known is None or known[1] != parent or known[2] != tokens:
            return None
        return known[0]

    def claim(self, parent: int, tokens: bytes, node: int) -> int | None:
        key = self._hash_block(self._key[parent], tokens)
        known = self._node.get(key)
        if known is not None:
            return known[0] if known[1] == parent and known[2] == tokens else None
        self._node[key] = node, parent, tokens
        self._key[node] = key
        return node

    def remove(self, parent: int, tokens: bytes, node: int) -> None:
        del self._node[self._key.pop(node)]


class TreeLookup:
    """By parent and exact tokens: no hash of ours, nothing that can collide."""

    def __init__(self) -> None:
        self._node: dict[tuple[int, bytes], int] = {}

    def add_root(self, root: int, salt: bytes) -> None:
        pass

    def find(self, parent: int, tokens: bytes) -> int | None:
        return self._node.get((parent, tokens))

    def claim(self, parent: int, tokens: bytes, node: int) -> int | None:
        return self._node.setdefault((parent, tokens), node)

    def remove(self, parent: int, tokens: bytes, node: int) -> None:
        del self._node[parent, tokens]
