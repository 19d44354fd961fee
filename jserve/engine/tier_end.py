"""The end of an engine with a disk: what is cached goes to files, as far as time allows, for the next start."""

from __future__ import annotations

import logging
import time
from typing import Protocol

from jserve.kv import BlockManager
from jserve.tiers.disk_store import DiskStore

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
_POLL_S = 0.005


class SavingRunner(Protocol):
    def save_now(self, saves: list[tuple[int, int, int]]) -> None:
        """Copies blocks (group, block, host block) to host memory, and waits for them."""


def keep_cached(blocks: BlockManager, runner: SavingRunner, disk: DiskStore, timeout_s: float = TIMEOUT_S) -> None:
    """On the engine thread, after the last step. The last used first: heads of chains that others begin with."""
    deadline = time.monotonic() + timeout_s
    try:
        blocks.tiers.save_cached()
        saves = blocks.take_saves()
        runner.save_now(saves)
        blocks.saves_arrived(saves)
        blocks.tiers.poll()
        while blocks.tiers.num_disk_writes_left and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            blocks.tiers.poll()
    except Exception:  # the end goes on
        log.exception("cached KV blocks were not kept on the disk")
    disk.close(max(0.0, deadline - time.monotonic()))
