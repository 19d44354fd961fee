"""What a tier of the prefix cache is: memory below another one, for blocks that the one above has no room for.

Host memory lies below the device, a disk below host memory. A tier decides which of its blocks holds what; the copies
themselves run elsewhere, in steps or in threads, and blocks are nobody else's until they are reported done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tier(Protocol):
    """Blocks of cached prefixes, by layer group and node of the prefix index."""

    def lookup(self, group: int, node: int) -> bool:
        """Whether it has the node's block."""

    def save(self, group: int, nodes: Sequence[int], blocks: Sequence[int]) -> None:
        """Starts to copy each node's content from its block of the memory above, as far as it has none yet and there is
        room."""

    def load(self, group: int, node: int) -> bool:
        """Starts to copy the node's block into the memory above; False where there is no room.

        Once the copy is done, or sure to be done before anybody reads, the memory above has the block."""
