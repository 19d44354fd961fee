"""A parameter tree as an Orbax checkpoint: written a layer of a parameter at a time, restored a parameter at a time.

The tree is nested dicts under the model's own names (`layers.qkv`), so any Orbax program restores it; each array is a
zarr folder, uncompressed, in chunks within a layer.  Orbax is slow to import, so only these functions do it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jserve.models.quantized import QuantizedMatrix, quantize_rows
from jserve.models.spec import ParamSpec, checkpoint_tensors, num_bytes
from jserve.parallel.placement import Placement
from jserve.weights.checkpoint import Checkpoint
from jserve.weights.errors import WeightsError
from jserve.weights.load import Progress, aligned_empty, check_one_to_one, fill

CHUNK_BYTES = 64 << 20
"""Of one array; what a reader of a part of it has to read at least."""


def save_params(
    folder: Path, specs: Any, checkpoint: Checkpoint, progress: Progress = lambda done, total: None
) -> None:
    """Writes the checkpoint's parameters into the new `folder`.  Host memory: one matrix and a few chunks."""
    import orbax.checkpoint as ocp

    check_one_to_one(specs, checkpoint)
    total, done = num_bytes(specs), 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    tree = _nested({name: _Streamed(spec, checkpoint, report) for name, spec in named_specs(specs).items()})
    registry = ocp.type_handlers.create_type_handler_registry((_Streamed, _streaming_handler()))
    with _quiet():
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, type_handler_registry=registry)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(tree))


def restore_params(
    folder: Path, stored: Any, specs: Any, placement: Placement, progress: Progress | None = None
) -> Any:
    """The spec tree with arrays for specs, each in its spec's dtype, read by Orbax straight into its devices.

    A parameter that is quantized, or has another order than in `stored` (the spec tree of what was saved), is read to
    the host first.
    """
    import orbax.checkpoint as ocp

    named, named_stored = named_specs(specs), named_specs(stored)
    total, done, arrays = num_bytes(specs), 0, {}
    with _quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        try:
            _check_shapes(folder, named_stored, _flat(checkpointer.metadata(folder.absolute()).item_metadata.tree))
            for name, spec in named.items():
                found = named_stored[name]
                on_host = spec.quantized or spec.source != found.source
                if on_host:
                    how = ocp.RestoreArgs(restore_type=np.ndarray)
                else:
                    sharding = placement.sharding(spec.logical_axes, spec.shape)
                    how = ocp.ArrayRestoreArgs(sharding=sharding, dtype=spec.dtype)
                wanted = _nested({name: jax.ShapeDtypeStruct(found.shape, spec.dtype)})
                args = ocp.args.PyTreeRestore(wanted, restore_args=_nested({name: how}), partial_restore=True)
                [array] = jax.tree.leaves(checkpointer.restore(folder.absolute(), args=args))
                arrays[name] = _placed(spec.reordered(array, found), spec, placement) if on_host else array
                done += spec.num_bytes
                if progress is not None:
                    progress(done, total)
        except (OSError, ValueError, KeyError) as error:
            if isinstance(error, WeightsError):
                raise
            raise WeightsError(f"{folder}: Orbax cannot restore it: {str(error).splitlines()[0]}") from error
    return jax.tree.unflatten(jax.tree.structure(specs), arrays.values())


@dataclass(frozen=True)
class _Streamed:
    """A parameter that is read from the checkpoint while Orbax writes it."""

    spec: ParamSpec
    checkpoint: Checkpoint
    report: Callable[[int], None]

    @property
    def chunks(self) -> tuple[int, ...]:
        """Rows of one layer, cut evenly: zarr fills the last chunk up to a whole one."""
        rows, *rest = self.spec.layer_shape
        num_chunks = -(-math.prod(self.spec.layer_shape) * self.spec.dtype.itemsize // CHUNK_BYTES)
        layer = (-(-rows // num_chunks), *rest)
        return (1, *layer) if self.spec.stacked else layer

    def pieces(self) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
        """(where in the parameter, content) of every chunk; the content is good until the next is asked for."""
        spec = self.spec
        array = np.empty((1, *spec.layer_shape) if spec.stacked else spec.shape, spec.dtype)
        for layer, tensors in itertools.groupby(checkpoint_tensors(spec), key=lambda found: found[2]):
            for name, piece, _ in tensors:
                fill(spec.view(array, piece, 0), self.checkpoint.tensors[name], None)
            step = self.chunks[1 if spec.stacked else 0]
            for start in range(0, spec.num_rows, step):
                rows = slice(start, min(start + step, spec.num_rows))
                yield ((slice(layer, layer + 1), rows), array[:, rows]) if spec.stacked else ((rows,), array[rows])


def _streaming_handler() -> Any:
    """An Orbax type handler for `_Streamed`.  What it writes is, on disk, an ordinary numpy array of Orbax's."""
    import tensorstore
    from orbax.checkpoint import type_handlers

    class Handler(type_handlers.NumpyHandler):
        async def serialize(self, values, infos, args=None):
            for value, info, arg in zip(values, infos, args or [type_handlers.SaveArgs()] * len(values)):
                await info.await_path_creation()
                spec = type_handlers.get_json_tspec_write(
                    info, use_ocdbt=False, global_shape=value.spec.shape, local_shape=value.spec.shape,
                    dtype=value.spec.dtype, arg=arg,
                )
                spec["metadata"] |= {"chunks": list(value.chunks), "compressor": None}
                target = await tensorstore.open(
                    tensorstore.Spec(spec), create=True, open=True, context=info.ts_context
                )
                for where, content in value.pieces():
                    await target[where].write(content)  # committed before the array is filled anew
                    value.report(content.nbytes)
            return []

    return Handler()


def _placed(array: np.ndarray, spec: ParamSpec, placement: Placement) -> jax.Array | QuantizedMatrix:
    if not spec.quantized:
        return placement.put(array.astype(spec.dtype, copy=False), spec.logical_axes)
    values, scales = aligned_empty(spec.shape, np.int8), aligned_empty(spec.shape[:-1], np.float32)
    for row in np.ndindex(spec.shape[:-2]):
        quantize_rows(array[row], values[row], scales[row])
    axes = spec.logical_axes
    return QuantizedMatrix(placement.put(values, axes), placement.put(scales, axes[:-1]))


def _check_shapes(folder: Path, named: Mapping[str, ParamSpec], stored: Mapping[str, Any]) -> None:
    if unequal := sorted(named.keys() ^ stored.keys()):
        name = unequal[0]
        problem = f"missing {name}" if name in named else f"no parameter takes {name}"
        raise WeightsError(f"{folder}: {problem}; convert the model again")
    for name, spec in named.items():
        found = tuple(stored[name].shape)
        if found != spec.shape:
            raise WeightsError(f"{folder}: {name} is {list(found)}, the config makes it {list(spec.shape)}")


def named_specs(specs: Any) -> dict[str, ParamSpec]:
    """{`layers.qkv`: spec} in the tree's order."""
    return {".".join(entry.name for entry in path): spec for path, spec in jax.tree_util.tree_leaves_with_path(specs)}


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, leaf in flat.items():
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for name, value in tree.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Orbax tells of every phase through absl's logger; what goes wrong comes as an exception."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
