"""KV blocks in host memory, by layer group and host block id: where preempted sequences and cached prefixes wait.

Saves arrive while later steps run and are put in their places when the step behind them has been collected, or when
somebody wants them back.  Knows no sequence; which block is whose is the block manager's business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np


@dataclass(frozen=True)
class _Arriving:
    step_id: int
    group: int
    host_blocks: list[int]
    staging: jax.Array  # [at least len(host_blocks), *block], on its way from the device


class HostBlocks:
    """Invariant: once settled, a host block holds what was saved into it last."""

    def __init__(self, num_blocks: int, block_shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype]):
        """num_blocks: of each group, block 0 (never used) included.  Memory is taken when it is first written to."""
        self._blocks = [np.empty((num_blocks, *shape), dtype) for shape, dtype in zip(block_shapes, dtypes)]
        self._arriving: deque[_Arriving] = deque()

    def save(self, step_id: int, group: int, host_blocks: list[int], staging: jax.Array) -> None:
        """Takes blocks that the device is still writing; does not wait for them."""
        staging.copy_to_host_async()
        self._arriving.append(_Arriving(step_id, group, host_blocks, staging))

    def settle(self, step_id: int | None = None) -> None:
        """Waits for the saves of all steps up to step_id (None: of all)."""
        while self._arriving and (step_id is None or self._arriving[0].step_id <= step_id):
            arriving = self._arriving.popleft()
            self._blocks[arriving.group][arriving.host_blocks] = np.asarray(arriving.staging)[: len(arriving.host_blocks)]

    def load(self, group: int, host_blocks: list[int], count: int) -> np.ndarray:
        """[count, *block]: the blocks, one after another, in memory of their own; what lies behind them means nothing."""
        wanted = {(group, host_block) for host_block in host_blocks}
        for arriving in reversed(self._arriving):  # of those that nobody waits for here the device may still be at work
            if not wanted.isdisjoint((arriving.group, host_block) for host_block in arriving.host_blocks):
                self.settle(arriving.step_id)
                break
        source = self._blocks[group]
        staging = np.empty((count, *source.shape[1:]), source.dtype)
        np.take(source, host_blocks, axis=0, out=staging[: len(host_blocks)])
        return staging

    def bytes_of(self, group: int, host_block: int) -> np.ndarray:
        """u8[n]: a block's memory itself. Settled, and nobody else's, or it means nothing."""
        return self._blocks[group][host_block].reshape(-1).view(np.uint8)

    def forget(self) -> None:
        """The device lost what it was to save."""
        self._arriving.clear()
