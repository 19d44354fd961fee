"""The public calls: choose an implementation, prepare a step's metadata once, attend in every layer.

Implementations are modules of this folder with `validate`, `prepare` and `attend`; nothing outside names them except by string.
Called by model code under jit; knows neither models nor schedulers.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.batch import AttentionSpec, RaggedBatch
from pallas_kernels.paged_attention.layout import PoolLayout, spread

IMPLEMENTATIONS = ("reference", "xla", "aligned", "llvm_cpu", "mosaic_tpu", "mosaic_gpu", "triton")
LOGGER = logging.getLogger(__name__)
_ORDER = {"cpu": ("llvm_cpu", "xla"), "gpu": ("mosaic_gpu", "triton", "xla"), "tpu": ("mosaic_tpu", "xla")}


def choose(platform: str, layout: PoolLayout, spec: AttentionSpec, implementation: str | None = None) -> str:
    """The implementation to use: the first of the platform's order that can serve `layout` and `spec`.

    An explicit `implementation` is that one or nothing: its NotImplementedError is raised.
    """
    if implementation is not None:
        _module(implementation).validate(layout, spec)
        LOGGER.info("attention on %s by %s, as asked for", _device_name(platform), implementation)
        return implementation
    refusals = []
    for name in _ORDER[platform]:
        try:
            _module(name).validate(layout, spec)
        except NotImplementedError as error:
            refusals.append(f"{name}: {error}")
            continue
        why = f"; not by {'; '.join(refusals)}" if refusals else ""
        LOGGER.info("attention on %s by %s%s", _device_name(platform), name, why)
        return name
    raise NotImplementedError("; ".join(refusals))


def prepare(
    batch: RaggedBatch, num_tokens: int, layout: PoolLayout, spec: AttentionSpec, implementation: str
) -> Any:
    """What `implementation` derives from a step's geometry, as a pytree.  Once a step, inside jit, outside the layer loop.

    A row longer than its table becomes a padding row: reading on from a clamped index would give it another block's keys.
    """
    num_rows, max_blocks = batch.block_tables.shape
    if batch.kv_lens.shape != (num_rows,) or batch.cu_q_lens.shape != (num_rows + 1,):
        raise ValueError(
            f"{num_rows} table rows need kv_lens[{num_rows}] and cu_q_lens[{num_rows + 1}], "
            f"got {batch.kv_lens.shape} and {batch.cu_q_lens.shape}"
        )
    module = _module(implementation)
    module.validate(layout, spec)
    fits = batch.kv_lens <= max_blocks * layout.block_size
    batch = dataclasses.replace(batch, kv_lens=jnp.where(fits, batch.kv_lens, 0))
    return module.prepare(batch, num_tokens, layout, spec)


def paged_attention(
    q: jax.Array,  # [T, N, H]
    k: jax.Array,  # [T, K, H], this step's keys
    v: jax.Array,  # [T, K, H], this step's values
    pool: jax.Array,  # layout.shape(num_layers, num_blocks), layout.storage_dtype
    layer: jax.Array | int,  # i32[]
    metadata: Any,  # from prepare() with the same layout, spec and implementation
    *,
    layout: PoolLayout,
    spec: AttentionSpec,
    implementation: str,
    sinks: jax.Array | None = None,  # f32[N] where spec.has_sinks
    k_scale: jax.Array | None = None,  # f32[] or f32[K]: the pool holds k / k_scale
    v_scale: jax.Array | None = None,  # f32[] or f32[K]: the pool holds v / v_scale
) -> tuple[jax.Array, jax.Array]:
    """Writes k and v of this step into `pool` (in place under donation), then attends.  Returns (out [T, N, H], pool).

    Padding tokens write to the dead block and their rows of `out` are unspecified.  No sequence may read, in the same call,
    a block that another one writes.  The softmax is in float32 whatever the inputs are.
    """
    if q.ndim != 3 or k.shape != v.shape or k.shape != (q.shape[0], layout.num_kv_heads, layout.head_dim):
        raise ValueError(f"q {q.shape}, k {k.shape}, v {v.shape} do not fit {layout}")
    if q.shape[2] != layout.head_dim or q.shape[1] % layout.num_kv_heads:
        raise ValueError(f"q {q.shape}: {layout.num_kv_heads} kv heads of {layout.head_dim} cannot serve these heads")
    if pool.shape != layout.shape(*pool.shape[:2]) or pool.dtype != layout.storage_dtype:
        raise ValueError(f"pool {pool.dtype}{pool.shape} is not of {layout}")
    if spec.has_sinks != (sinks is not None):
        raise ValueError(f"spec.has_sinks={spec.has_sinks} but sinks={'given' if sinks is not None else None}")
    if layout.spreads:
        q, k, v = (spread(x) for x in (q, k, v))
    out, pool = _module(implementation).attend(
        q, k, v, pool, layer, metadata, layout=layout, spec=spec, sinks=sinks, k_scale=k_scale, v_scale=v_scale
    )
    return (spread(out) if layout.spreads else out), pool


def _device_name(platform: str) -> str:
    """With the device's kind, where this process has one."""
    try:
        return f"{platform} ({jax.devices(platform)[0].device_kind})"
    except RuntimeError:
        return platform


def _module(name: str) -> ModuleType:
    """The implementation's module, imported when first asked for: its compiler may be absent on other platforms."""
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={name!r}: one of {', '.join(IMPLEMENTATIONS)}")
    module = f"{__package__}.{name}"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise NotImplementedError(f"{name} is not built yet") from error
