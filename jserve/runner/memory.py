"""Memory arithmetic: what weights, activations and the KV pool take, worked out before anything is allocated.

The KV pool gets `fraction x device memory - weights - activations`; on a CPU, whose memory is shared with everything
else, it gets a fixed size instead.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from jserve.config import ConfigError, KvSection

GIB = 1024**3
CPU_POOL_BYTES = 1 * GIB


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one device, and what the pool holds."""

    device_bytes: int
    """What the device has (CPU: what was available before the weights were loaded)."""
    usable_bytes: int
    """What weights, activations and pool may take together."""
    weight_bytes: int
    activation_bytes: int
    pool_bytes: int
    bytes_per_block: int
    num_blocks: int
    block_size: int
    num_devices: int = 1
    """That have as much each, and a part of every block."""

    @property
    def num_usable_blocks(self) -> int:
        """Without the dead block, which padding writes to: what every report of the pool counts."""
        return self.num_blocks - 1

    @property
    def num_tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.num_usable_blocks * self.block_size

    def __str__(self) -> str:
        return (
            f"memory{f' of each of {self.num_devices} devices' if self.num_devices > 1 else ''}: {_gib(self.usable_bytes)} usable of {_gib(self.device_bytes)}; weights {_gib(self.weight_bytes)}, "
            f"activations {_gib(self.activation_bytes)}, KV pool {_gib(self.pool_bytes)} = {self.num_usable_blocks} blocks "
            f"of {self.block_size} tokens = {self.num_tokens:,} tokens ({self.bytes_per_block // self.block_size:,} bytes each)"
        )


def plan_memory(
    kv: KvSection,
    *,
    platform: str,
    device_bytes: int,
    weight_bytes: int,
    activation_bytes: int,
    bytes_per_block: int,
    block_size: int,
    num_devices: int = 1,
) -> MemoryPlan:
    """Sizes the pool.

    Args:
      device_bytes: on an accelerator its memory; on a CPU what is available now, the weights already taken.
      bytes_per_block: of all layers and groups together, on one device.
      num_devices: that share the model; for messages.
    Raises:
      ConfigError: with the numbers, where the pool does not fit or could hold nothing.
    """
    if platform == "cpu":
        default_pool = min(CPU_POOL_BYTES, (device_bytes - activation_bytes) // 2)
        usable = device_bytes = device_bytes + weight_bytes
    else:
        usable = int(device_bytes * kv.memory_fraction)
        default_pool = usable - weight_bytes - activation_bytes
    if kv.num_blocks is not None:
        pool, asked = kv.num_blocks * bytes_per_block, f"kv.num_blocks = {kv.num_blocks}"
    elif kv.memory_bytes is not None:
        pool, asked = kv.memory_bytes, f"kv.memory_bytes = {kv.memory_bytes}"
    else:
        pool, asked = default_pool, f"kv.memory_fraction = {kv.memory_fraction}"
    num_blocks = pool // bytes_per_block
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
        pool_bytes=num_blocks * bytes_per_block,
        bytes_per_block=bytes_per_block,
        num_blocks=num_blocks,
        block_size=block_size,
        num_devices=num_devices,
    )


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
