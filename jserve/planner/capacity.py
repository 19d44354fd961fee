"""What fits: weights, KV pool, and how many sequences of a length it holds, paged and preallocated."""

from __future__ import annotations

from dataclasses import dataclass

from jserve.config import ConfigError
from jserve.planner.roofline import Roofline


@dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    device_bytes: float
    usable_bytes: float
    weight_bytes: float
    """This device's share."""
    reserve_bytes: float
    """Activations and everything else."""
    kv_bytes_per_token: tuple[int, ...]
    """Of each layer group."""
    windows: tuple[int | None, ...]
    block_size: int

    @property
    def pool_bytes(self) -> float:
        return self.usable_bytes - self.weight_bytes - self.reserve_bytes

    @property
    def pool_tokens(self) -> int:
        """Tokens of which every layer keeps all."""
        return int(self.pool_bytes // sum(self.kv_bytes_per_token))

    @property
    def num_blocks(self) -> int:
        return self.pool_tokens // self.block_size

    def sequence_bytes(self, length: float, slack: float) -> float:
        """Bytes of one sequence: `slack` tokens more than it has, but no more than a window and one block."""
        total = 0.0
        for bytes_per_token, window in zip(self.kv_bytes_per_token, self.windows):
            held = length + slack
            total += bytes_per_token * (held if window is None else min(held, window + self.block_size))
        return total

    def max_paged(self, mean_length: float, block_size: int | None = None) -> int:
        """Sequences of that mean length; each wastes on average half of its last block, (block_size - 1) / 2 tokens."""
        waste = ((block_size or self.block_size) - 1) / 2
        return int(self.pool_bytes // self.sequence_bytes(mean_length, waste))

    def max_preallocated(self, max_length: int) -> int:
        """Sequences, where each holds room for the longest."""
        return int(self.pool_bytes // self.sequence_bytes(max_length, 0))


def plan_memory(roofline: Roofline, *, block_size: int, memory_fraction: float, reserve_bytes: float) -> Memory:
    """The arithmetic of one device.

    Raises:
      ConfigError: with the numbers, where the weights leave no room for a pool, and what would do.
    """
    device, devices = roofline.device, roofline.tensor_parallel_size
    memory = Memory(
        device_bytes=device.memory_bytes,
        usable_bytes=device.memory_bytes * memory_fraction,
        weight_bytes=roofline.weight_bytes_per_device,
        reserve_bytes=reserve_bytes,
        kv_bytes_per_token=roofline.kv_bytes_per_token,
        windows=tuple(group.window for group in roofline.model.groups),
        block_size=block_size,
    )
    if memory.num_blocks < 2:
        room = memory.usable_bytes - reserve_bytes
        enough = next((n for n in (1, 2, 4, 8, 16, 32, 64) if roofline.weight_bytes / n < room), None)
        hint = f"; {enough} or more devices would hold the weights" if enough and enough > devices else ""
        raise ConfigError(
            f"{roofline.model.name} does not fit {device.name}: {gb(memory.usable_bytes)} usable of"
            f" {gb(memory.device_bytes)} - weights {gb(memory.weight_bytes)} - reserve {gb(reserve_bytes)} leaves"
            f" {gb(memory.pool_bytes)} for the KV pool, a block of {block_size} tokens takes"
            f" {sum(memory.kv_bytes_per_token) * block_size:,} bytes{hint}"
        )
    return memory


def gb(count: float) -> str:
    return f"{count / 1e9:.2f} GB"
