"""Where an engine's arrays live, and how its programs run there: on one device, or over a mesh of several.

The one place that maps logical axis names to the mesh.  A program over several devices is the program of one, run by
each on its part (shard_map): model code asks for the sums that join the parts, nothing is left to a partitioner.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

AXIS = "model"
"""The mesh's only axis."""
RULES: Mapping[str, str] = MappingProxyType({"vocab": AXIS, "heads": AXIS, "kv_heads": AXIS, "ffn": AXIS})
"""Logical axis -> mesh axis.  Others stay whole on every device; so does a vocabulary that does not divide."""

WHOLE = PartitionSpec()
"""Every device has all of it."""
POOL = PartitionSpec(None, None, AXIS)
"""A KV pool, and a staging buffer of its blocks: [.., .., kv heads, ..]."""


@dataclass(frozen=True)
class Placement:
    """The devices of an engine."""

    devices: tuple[jax.Device, ...]

    @property
    def num_shards(self) -> int:
        return len(self.devices)

    @property
    def axis(self) -> str | None:
        """The mesh axis over which model code joins parts; None: there is one part."""
        return AXIS if self.num_shards > 1 else None

    @functools.cached_property
    def mesh(self) -> Mesh:
        """In an order in which neighbours are linked, where the devices tell of their links."""
        return Mesh(mesh_utils.create_device_mesh((self.num_shards,), self.devices), (AXIS,))

    # -- arrays

    def sharding(self, logical_axes: Sequence[str] = (), shape: Sequence[int] = ()) -> Sharding:
        """Of an array of that shape with these logical axes; without any, whole everywhere."""
        if self.num_shards == 1:
            return SingleDeviceSharding(self.devices[0])
        names = [RULES.get(axis) if size % self.num_shards == 0 else None for axis, size in zip(logical_axes, shape)]
        return NamedSharding(self.mesh, PartitionSpec(*names))

    def put(self, array: np.ndarray, logical_axes: Sequence[str]) -> jax.Array:
        """Each device gets its part of a host array, and no more.

        On CPU the array itself may become the jax array.  Elsewhere the copies are awaited: one array at a time.
        """
        sharding = self.sharding(logical_axes, array.shape)
        if self.num_shards == 1:
            placed = jax.device_put(array, self.devices[0], may_alias=True)
        else:
            placed = jax.make_array_from_callback(array.shape, sharding, lambda part: np.ascontiguousarray(array[part]))
        return jax.block_until_ready(placed) if self.copies else placed

    @property
    def copies(self) -> bool:
        """Whether arrays are copied to the devices; a CPU takes the host's as they are."""
        return self.devices[0].platform != "cpu"

    def empty(self, shape: tuple[int, ...], dtype: Any, logical_axes: Sequence[str]) -> jax.Array:
        """For `with_layer` to fill."""
        return jnp.zeros(shape, dtype, device=self.sharding(logical_axes, shape))

    def with_layer(self, whole: jax.Array, layer: int, array: np.ndarray, logical_axes: Sequence[str]) -> jax.Array:
        """`whole` (donated) with a host array as its layer; when this returns the host array may be filled anew."""
        part = self.put(array, logical_axes[1:])
        return jax.block_until_ready(_write_layer(whole.sharding)(whole, part, np.int32(layer)))

    def zeros(self, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec = WHOLE) -> jax.Array:
        return jnp.zeros(shape, dtype, device=self._place_of(spec))

    def put_whole(self, tree: Any) -> Any:
        """The tree's arrays on every device."""
        return tree if self.num_shards == 1 else jax.device_put(tree, self._place_of(WHOLE))

    def shape(self, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec = WHOLE) -> jax.ShapeDtypeStruct:
        """An array to lower programs with."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._place_of(spec))

    def shapes_whole(self, tree: Any) -> Any:
        """The tree's shapes, each whole on every device."""
        return jax.tree.map(lambda leaf: self.shape(leaf.shape, leaf.dtype), tree)

    def pool_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of a KV pool of all devices, out of that of one device's part."""
        num_layers, num_blocks, num_kv_heads, *block = shape
        return (num_layers, num_blocks, num_kv_heads * self.num_shards, *block)

    def bytes_per_device(self, tree: Any) -> int:
        """What one device holds of a tree of placed arrays, or of shapes with shardings."""
        return sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
        )

    def _place_of(self, spec: PartitionSpec) -> Sharding | None:
        return None if self.num_shards == 1 else NamedSharding(self.mesh, spec)

    # -- programs

    def split(self, program: Callable, arguments: Sequence[Any], results: Any) -> Callable:
        """`program` as each device runs it on its part of the arguments.

        Args:
          arguments: placed arrays, or shapes with shardings.
          results: PartitionSpecs of what it returns, a prefix of its tree.
        """
        if self.num_shards == 1:
            return program
        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, tuple(arguments))
        return jax.shard_map(program, mesh=self.mesh, in_specs=specs, out_specs=results, check_vma=False)

    def lowering(
        self, program: Callable, arguments: Sequence[Any], results: Any = WHOLE, donated: tuple[int, ...] = ()
    ) -> Callable[[], jax.stages.Lowered]:
        """A function that lowers `program` for these arguments."""
        return functools.partial(jax.jit(self.split(program, arguments, results), donate_argnums=donated).lower, *arguments)


@functools.cache
def _write_layer(sharding: Sharding) -> Callable:
    """(whole, part, layer) -> whole, in place."""
    write = functools.partial(jax.lax.dynamic_update_index_in_dim, axis=0)
    return jax.jit(write, donate_argnums=0, out_shardings=sharding)


def on_devices(devices: Sequence[jax.Device]) -> Placement:
    return Placement(tuple(devices))
