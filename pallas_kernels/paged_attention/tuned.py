"""Tile sizes that were measured on a device: JSON by device kind in `tuned/`, written by tools/tune_kernels.py.

An implementation asks for its sizes while it is traced; where the device, or the shape on it, was never tuned it keeps
its own defaults.  What is known of a device is frozen when it is first asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax

from pallas_kernels.paged_attention.layout import PoolLayout

FOLDER = Path(__file__).parent / "tuned"
Tiles = TypeVar("Tiles")


def tuned(defaults: Tiles, implementation: str, layout: PoolLayout) -> Tiles:
    """`defaults`, a dataclass of sizes, with those that were tuned for this shape on the device compiled for."""
    kind = device_kind(layout.platform)
    entry = None if kind is None else read(kind).get(key(implementation, layout))
    return defaults if entry is None else dataclasses.replace(defaults, **entry)


def key(implementation: str, layout: PoolLayout) -> str:
    """What a tuned entry is for: `mosaic_tpu 8x128 bfloat16 block 64`."""
    heads = f"{layout.num_kv_heads}x{layout.head_dim}"
    return f"{implementation} {heads} {layout.dtype.name} block {layout.block_size}"


def device_kind(platform: str) -> str | None:
    """Of the devices compiled for: those of the mesh that is set, which may be elsewhere, or this process's; None where
    there are none of the platform."""
    elsewhere = jax.sharding.get_abstract_mesh().abstract_device
    if elsewhere is not None and elsewhere.platform == platform:
        return elsewhere.device_kind
    return _own_device_kind(platform)


@functools.cache
def _own_device_kind(platform: str) -> str | None:
    try:
        return jax.devices(platform)[0].device_kind
    except RuntimeError:
        return None


@functools.cache
def read(kind: str) -> Mapping[str, Mapping[str, int]]:
    """key -> sizes; nothing for a device that was never tuned."""
    path = path_of(kind)
    return json.loads(path.read_text())["tiles"] if path.is_file() else {}


def write(kind: str, tiles: Mapping[str, Mapping[str, int]], facts: Mapping[str, Any], folder: Path | None = None) -> Path:
    """Adds entries to a device's file, in place of older ones of the same keys; `facts` say how they were measured."""
    path = path_of(kind, folder)
    known = json.loads(path.read_text())["tiles"] if path.is_file() else {}
    content = {"device": kind, **facts, "tiles": dict(sorted({**known, **tiles}.items()))}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def path_of(kind: str, folder: Path | None = None) -> Path:
    return (folder or FOLDER) / f"{re.sub(r'[^a-z0-9]+', '_', kind.lower()).strip('_')}.json"
