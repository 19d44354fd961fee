"""What a device can do, from its data sheet: memory, bandwidth, dense 16-bit matrix rate, links to its peers.

Figures are per JAX device, in powers of ten.  A TPU slice is named as Google Cloud names it: v5e and v6e count chips,
v5p and tpu7x count cores (v5p-8 is 4 chips of one device each, tpu7x-8 is 4 chips of two devices each).
"""

from __future__ import annotations

from dataclasses import dataclass

from jserve.config import BadUsage


@dataclass(frozen=True)
class DeviceSpec:
    name: str
    platform: str
    """cpu, gpu or tpu: decides how the KV pool is laid out."""
    memory_bytes: float
    bytes_per_s: float
    """Peak bandwidth of the device's memory."""
    flops_per_s: float
    """Dense multiply-adds in 16 bits (float32 on a CPU), two operations each."""
    link_bytes_per_s: float = 0.0
    """To and from its peers, one direction; 0: it has none."""
    num_devices: int = 1
    """Devices of the slice; a GPU is counted by --tensor-parallel-size."""


def _slice(name: str, count: int, memory: float, bandwidth: float, flops: float, link: float) -> DeviceSpec:
    return DeviceSpec(name, "tpu", memory * 1e9, bandwidth * 1e9, flops * 1e12, link * 1e9, count)


def _gpu(name: str, memory: float, bandwidth: float, flops: float, link: float) -> DeviceSpec:
    return DeviceSpec(name, "gpu", memory * 1e9, bandwidth * 1e9, flops * 1e12, link * 1e9)


DEVICES = {
    spec.name: spec
    for spec in (
        # name, GB, GB/s, TFLOP/s, GB/s a direction
        _gpu("a100-80gb", 80, 2039, 312, 300),
        _gpu("l4", 24, 300, 121, 32),
        _gpu("h100-80gb", 80, 3350, 990, 450),
        _gpu("h200", 141, 4800, 990, 450),
        _gpu("b200", 180, 8000, 2250, 900),
        # name, devices, GB, GB/s, TFLOP/s, GB/s a direction
        _slice("v5e-1", 1, 16, 819, 197, 100),
        _slice("v5e-4", 4, 16, 819, 197, 100),
        _slice("v5e-8", 8, 16, 819, 197, 100),
        _slice("v4-8", 4, 32, 1228, 275, 100),
        _slice("v5p-8", 4, 95, 2765, 459, 300),
        _slice("v6e-1", 1, 32, 1640, 918, 200),
        _slice("v6e-4", 4, 32, 1640, 918, 200),
        _slice("v6e-8", 8, 32, 1640, 918, 200),
        _slice("tpu7x-8", 8, 96, 3690, 1153, 300),
        # Two cores as measured: float32 dots of 32 rows and more; memory is what the pool's default lets it use.
        DeviceSpec("cpu", "cpu", 8e9, 20e9, 0.15e12),
    )
}


def find_device(name: str) -> DeviceSpec:
    """The device called `name`; ConfigError lists the known ones."""
    if name not in DEVICES:
        raise BadUsage(f"--device {name}: not known; known: {', '.join(DEVICES)}")
    return DEVICES[name]


_OF_TARGET = {
    "v4": "v4-8", "v5e": "v5e-1", "v5p": "v5p-8", "v6e": "v6e-1", "tpu7x": "tpu7x-8", "h100": "h100-80gb",
    "a100": "a100-80gb",
}  # fmt: skip


def find_target(target: str) -> DeviceSpec:
    """The device that a compile target (pallas_kernels.targets) stands for."""
    return find_device(_OF_TARGET.get(target, target))
