"""TPU generations to compile for without having one, through libtpu's topology interface.

What a compile proves: the kernel is accepted, fits, aliases what it should, and what code it became.  It runs nothing.
Used by tests/compile and tools/count_bundles.py; needs libtpu (`pip install jax[tpu]`), no TPU.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
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
SINGLE_DEVICE_TARGETS = ("v4", "v5e", "v5p", "v6e", "tpu7x")


def configure_environment() -> None:
    """Call before jax starts a backend.  Keeps what is set already."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def has_tpu_compiler() -> bool:
    return importlib.util.find_spec("libtpu") is not None


@functools.cache
def devices(target: str) -> tuple:
    """Descriptions of the target's devices."""
    from jax.experimental import topologies

    wanted = TPU_TARGETS[target]
    options = {} if wanted.chips_per_host is None else {"chips_per_host_bounds": list(wanted.chips_per_host)}
    return tuple(topologies.get_topology_desc(platform="tpu", topology_name=wanted.topology, **options).devices)


def mesh(target: str, num_devices: int = 1, axis: str = "model"):
    import numpy as np
    from jax.sharding import Mesh

    return Mesh(np.array(devices(target)[:num_devices]), (axis,))


def step_compiler_options(target: str) -> dict[str, str]:
    """XLA options of a whole step; the one place where they are named.

    tpu7x: a scan over stacked 16-bit weights re-lays-out all of them each step (1.6 GiB of temporaries for an 8B
    model on 8 devices) unless second-minor tiles of 16 rows are turned off.  The flag is undocumented; tests/compile
    guards it by asserting the temporaries' size.
    """
    if target.startswith("tpu7x"):
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
