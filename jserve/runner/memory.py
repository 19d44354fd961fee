"""Memory arithmetic: what weights, activations and the KV pool take, worked out before anything is allocated.

The KV pool gets `fraction x device memory - weights - activations`; on a CPU, whose memory is shared with everything
else, it gets a fixed size instead.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from jserve.config import ConfigError, KvSection
from jserve.kv import GroupSpec

GIB = 1024**3
CPU_POOL_BYTES = 1 * GIB


@dataclass(frozen=True)
class GroupMemory:
    """What one layer group's pool takes."""

    num_layers: int
    bytes_per_block: int
    """On one device, all its layers."""
    window: int | None = None
    most_blocks: int | None = None
    """More would be of no use beside a group that keeps everything; None: no limit."""
    num_blocks: int = 0
    """The dead block included; set by plan_memory."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one device, and what the pools hold."""

    device_bytes: int
    """What the device has (CPU: what was available before the weights were loaded)."""
    usable_bytes: int
    """What weights, activations and pool may take together."""
    weight_bytes: int
    activation_bytes: int
    pool_bytes: int
    groups: tuple[GroupMemory, ...]
    block_size: int
    num_devices: int = 1
    """That have as much each, and a part of every block."""

    @property
    def bytes_per_block(self) -> int:
        """Of all groups together."""
        return sum(group.bytes_per_block for group in self.groups)

    @property
    def num_blocks(self) -> int:
        """Of the group that has most, the dead block included."""
        return max(group.num_blocks for group in self.groups)

    @property
    def num_usable_blocks(self) -> int:
        """Without the dead block, which padding writes to: what every report of the pool counts."""
        return self.num_blocks - 1

    @property
    def num_tokens(self) -> int:
        """Tokens that the pools hold, what is behind windows counted too."""
        return self.num_usable_blocks * self.block_size

    def most_tokens(self, step_tokens: int) -> int | None:
        """Tokens of one sequence alone in the pools, which grows by step_tokens; None: no limit."""
        limits = []
        for group in self.groups:
            held = GroupSpec(group.window).num_blocks_held(step_tokens, self.block_size)
            if held is None or held > group.num_blocks - 1:
                limits.append((group.num_blocks - 1) * self.block_size)
        return min(limits, default=None)

    def __str__(self) -> str:
        devices = f" of each of {self.num_devices} devices" if self.num_devices > 1 else ""
        lines = [
            f"memory{devices}: {_gib(self.usable_bytes)} usable of {_gib(self.device_bytes)}; "
            f"weights {_gib(self.weight_bytes)}, activations {_gib(self.activation_bytes)}, "
            f"KV pool {_gib(self.pool_bytes)} = {self.num_usable_blocks} blocks of {self.block_size} tokens = "
            f"{self.num_tokens:,} tokens ({self.bytes_per_block // self.block_size:,} bytes each)"
        ]
        if len(self.groups) > 1 or self.groups[0].window is not None:
            for group in self.groups:
                kind = "full attention" if group.window is None else f"window of {group.window:,} tokens"
                lines.append(
                    f"  {group.num_layers} layers, {kind}: {group.num_blocks - 1} blocks, "
                    f"{group.bytes_per_block // self.block_size:,} bytes a token"
                )
        return "\n".join(lines)


def plan_memory(
    kv: KvSection,
    *,
    platform: str,
    device_bytes: int,
    weight_bytes: int,
    activation_bytes: int,
    groups: tuple[GroupMemory, ...],
    block_size: int,
    num_devices: int = 1,
) -> MemoryPlan:
    """Sizes the pools: as many blocks for each group, but those of most_blocks.

    Args:
      device_bytes: on an accelerator its memory; on a CPU what is available now, the weights already taken.
      num_devices: that share the model; for messages.
    Raises:
      ConfigError: with the numbers, where the pool does not fit or could hold nothing.
    """
    bytes_per_block = sum(group.bytes_per_block for group in groups)
    if platform == "cpu":
        default_pool = min(CPU_POOL_BYTES, (device_bytes - activation_bytes) // 2)
        usable = device_bytes = device_bytes + weight_bytes
    else:
        usable = int(device_bytes * kv.memory_fraction)
        default_pool = usable - weight_bytes - activation_bytes
    if kv.num_blocks is not None:
        pool, asked = _bytes_of(groups, kv.num_blocks), f"kv.num_blocks = {kv.num_blocks}"
    elif kv.memory_bytes is not None:
        pool, asked = kv.memory_bytes, f"kv.memory_bytes = {kv.memory_bytes}"
    else:
        pool, asked = default_pool, f"kv.memory_fraction = {kv.memory_fraction}"
    num_blocks = _num_blocks(groups, pool)
    where = f"on each of {num_devices} devices " if num_devices > 1 else ""
    arithmetic = (
        f"{where}{_gib(usable)} usable - weights {_gib(weight_bytes)} - activations {_gib(activation_bytes)} leave "
        f"{_gib(usable - weight_bytes - activation_bytes)} for the KV pool"
    )
    if num_blocks < 2:
        raise ConfigError(
            f"{asked}: a pool of {_gib(max(pool, 0))} holds no block of {bytes_per_block:,} bytes besides the dead one; {arithmetic}"
        )
    if pool > usable - weight_bytes - activation_bytes:
        raise ConfigError(f"{asked}: a pool of {_gib(pool)} does not fit; {arithmetic}")
    return MemoryPlan(
        device_bytes=device_bytes,
        usable_bytes=usable,
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes,
        pool_bytes=_bytes_of(groups, num_blocks),
        groups=with_blocks(groups, num_blocks),
        block_size=block_size,
        num_devices=num_devices,
    )


def with_blocks(groups: tuple[GroupMemory, ...], num_blocks: int) -> tuple[GroupMemory, ...]:
    """The groups with their num_blocks: as many for each, but those of most_blocks."""
    return tuple(replace(group, num_blocks=_limited(group, num_blocks)) for group in groups)


def _limited(group: GroupMemory, num_blocks: int) -> int:
    return num_blocks if group.most_blocks is None else min(num_blocks, group.most_blocks)


def _bytes_of(groups: tuple[GroupMemory, ...], num_blocks: int) -> int:
    return sum(group.bytes_per_block * _limited(group, num_blocks) for group in groups)


def _num_blocks(groups: tuple[GroupMemory, ...], pool_bytes: int) -> int:
    """Most blocks of the groups without a limit that fit beside those of the others."""
    limited: tuple[GroupMemory, ...] = ()
    while True:
        others = [group for group in groups if group not in limited]
        left = pool_bytes - sum(group.bytes_per_block * group.most_blocks for group in limited)
        num_blocks = left // sum(group.bytes_per_block for group in others)
        more = tuple(group for group in others if group.most_blocks is not None and group.most_blocks < num_blocks)
        if not more:
            return num_blocks
        limited += more


def available_host_bytes() -> int:
    """Memory that the system can give without swapping."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"
