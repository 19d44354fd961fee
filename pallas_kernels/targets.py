"""TPU generations and GPUs to compile for without having one, by the topology interfaces of libtpu and the CUDA plugin.

What a compile proves: the kernel is accepted, fits, aliases what it should, and what code it became.  It runs nothing.
Used by tests/compile and tools; needs libtpu (`pip install jax[tpu]`) or jax's CUDA plugin, no device.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # the CUDA plugin too: started without a GPU it would unregister itself
    "TPU_SKIP_MDS_QUERY": "1",  # ask no cloud metadata server
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # two processes may compile at once
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


@dataclass(frozen=True)
class TpuTarget:
    """A slice of TPU chips, as libtpu names it."""

    topology: str
    num_devices: int
    chips_per_host: tuple[int, int, int] | None = None


TPU_TARGETS = {
    "v4": TpuTarget("v4:2x2x1", 8),
    "v5e": TpuTarget("v5e:1x1", 1, (1, 1, 1)),
    "v5p": TpuTarget("v5p:2x2x1", 4),
    "v6e": TpuTarget("v6e:1x1", 1, (1, 1, 1)),
    "tpu7x": TpuTarget("tpu7x:2x2x1", 8),  # two devices a chip
    "v5e-8": TpuTarget("v5e:2x4", 8),
    "v6e-8": TpuTarget("v6e:2x4", 8),
    "tpu7x-8": TpuTarget("tpu7x:2x2x1", 8),
}

@dataclass(frozen=True)
class GpuTarget:
    """A GPU as XLA's target_config names it, from public specifications.

    The compiler was seen to read capability and shared memory only.
    """

    compute_capability: tuple[int, int]
    num_cores: int
    memory_bandwidth: float
    """Bytes a second."""
    l2_bytes: int
    memory_bytes: int
    shared_bytes_per_block: int
    shared_bytes_per_core: int
    has_accelerated_features: bool = True

    @property
    def ptx_target(self) -> str:
        major, minor = self.compute_capability
        return f"sm_{major}{minor}{'a' if self.has_accelerated_features else ''}"


GPU_TARGETS = {
    "a100": GpuTarget((8, 0), 108, 2039e9, 40 << 20, 80 << 30, 166912, 167936, False),
    "l4": GpuTarget((8, 9), 58, 300e9, 48 << 20, 24 << 30, 101376, 102400, False),
    "h100": GpuTarget((9, 0), 132, 3352e9, 50 << 20, 80 << 30, 232448, 233472),
    "h200": GpuTarget((9, 0), 132, 4800e9, 50 << 20, 141 << 30, 232448, 233472),
    "b200": GpuTarget((10, 0), 148, 8000e9, 126 << 20, 180 << 30, 232448, 233472),
}
SINGLE_DEVICE_TARGETS = ("v4", "v5e", "v5p", "v6e", "tpu7x")


def configure_environment() -> None:
    """Call before jax starts a backend.  Keeps what is set already."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def has_tpu_compiler() -> bool:
    return importlib.util.find_spec("libtpu") is not None


def has_gpu_compiler() -> bool:
    plugins = importlib.util.find_spec("jax_plugins")
    return plugins is not None and any(importlib.util.find_spec(f"jax_plugins.xla_cuda{v}") for v in (12, 13))


@functools.cache
def devices(target: str, num_gpus: int = 1) -> tuple:
    """Descriptions of the target's devices; of a GPU as many as asked for, on one host."""
    from jax.experimental import topologies

    if target in GPU_TARGETS:
        _tell_mosaic_gpu(GPU_TARGETS[target].compute_capability)
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology_name=target,
            target_config=_gpu_target_config(target),
            topology=f"1 x 1 x {num_gpus}",
        )
        return tuple(topology.devices)
    wanted = TPU_TARGETS[target]
    options = {} if wanted.chips_per_host is None else {"chips_per_host_bounds": list(wanted.chips_per_host)}
    return tuple(topologies.get_topology_desc(platform="tpu", topology_name=wanted.topology, **options).devices)


def mesh(target: str, num_devices: int = 1, axis: str = "model"):
    import numpy as np
    from jax.sharding import Mesh

    all_devices = devices(target, num_devices) if target in GPU_TARGETS else devices(target)
    return Mesh(np.array(all_devices[:num_devices]), (axis,))


def _gpu_target_config(target: str) -> str:
    gpu = GPU_TARGETS[target]
    major, minor = gpu.compute_capability
    features = "feature_extension: ACCELERATED_FEATURES" if gpu.has_accelerated_features else ""
    return f"""
        gpu_device_info {{
            threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {1536 if target == "l4" else 2048}
            shared_memory_per_block: 49152 shared_memory_per_block_optin: {gpu.shared_bytes_per_block}
            shared_memory_per_core: {gpu.shared_bytes_per_core}
            core_count: {gpu.num_cores} fpus_per_core: {64 if target == "a100" else 128} clock_rate_ghz: 1.98
            block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
            memory_bandwidth: {int(gpu.memory_bandwidth)} l2_cache_size: {gpu.l2_bytes} device_memory_size: {gpu.memory_bytes}
            cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
            registers_per_core_limit: 65536 registers_per_block_limit: 65536
        }}
        platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }} device_description_str: "NVIDIA {target.upper()}"
    """


def _tell_mosaic_gpu(compute_capability: tuple[int, int]) -> None:
    """Without a device Mosaic GPU lowers for 9.0 whatever the target, and keeps kernels by source: one target a process."""
    global _mosaic_gpu_is_told
    if _mosaic_gpu_is_told not in (None, compute_capability):
        raise RuntimeError(f"this process compiled for {_mosaic_gpu_is_told}; compile for {compute_capability} in another")
    _mosaic_gpu_is_told = compute_capability
    from jax.experimental.mosaic.gpu import core, utils

    for module in (core, utils):
        if hasattr(module, "_infer_arch"):
            module._infer_arch = lambda: compute_capability
    from pallas_kernels.paged_attention import mosaic_gpu

    mosaic_gpu.assumed_compute_capability = ".".join(map(str, compute_capability))


_mosaic_gpu_is_told: tuple[int, int] | None = None


def step_compiler_options(target: str) -> dict[str, str]:
    """XLA options of a whole step on a target, or on devices of that kind; the one place where they are named.

    tpu7x: a scan over stacked 16-bit weights re-lays-out all of them each step (1.6 GiB of temporaries for an 8B
    model on 8 devices) unless second-minor tiles of 16 rows are turned off.  The flag is undocumented; tests/compile
    guards it by asserting the temporaries' size.
    """
    if target.lower().startswith("tpu7x"):
        return {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"}
    return {}


def compile_for(
    target: str,
    function: Callable,
    *arguments,
    num_devices: int = 1,
    specs: Sequence | None = None,
    donate: Sequence[int] = (),
    options: dict[str, str] | None = None,
):
    """Compiles `function`; `arguments` are trees of anything with shape and dtype, replicated but for `specs`."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    target_mesh = mesh(target, num_devices)
    specs = [PartitionSpec()] * len(arguments) if specs is None else specs

    def placed(tree, spec):
        sharding = NamedSharding(target_mesh, spec)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)

    arguments = [placed(tree, spec) for tree, spec in zip(arguments, specs, strict=True)]
    with jax.set_mesh(target_mesh):
        return jax.jit(function, donate_argnums=tuple(donate)).lower(*arguments).compile(compiler_options=options)
