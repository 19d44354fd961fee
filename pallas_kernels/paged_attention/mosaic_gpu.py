"""Ragged paged attention on GPU: decode rows and chunks as separate Pallas (Mosaic GPU) calls over one flat token axis.

    write       this step's keys and values go into their blocks: an XLA scatter, in place under donation
    decode      rows of one token attend, split over the chip and joined                        mosaic_gpu_decode
    chunks      tiles of the chunks' queries attend                                             mosaic_gpu_chunk

Written for Hopper (TMA and wgmma, compute capability 9.0).  Compiled for H100 and H200 and interpreted; not run on
hardware (docs/kernels-gpu.md).
"""

from __future__ import annotations

import functools

import jax

from pallas_kernels.paged_attention import gpu_step
from pallas_kernels.paged_attention.batch import AttentionSpec
from pallas_kernels.paged_attention.gpu_step import GpuMetadata, prepare
from pallas_kernels.paged_attention.layout import PoolLayout
from pallas_kernels.paged_attention.mosaic_gpu_chunk import attend_chunks
from pallas_kernels.paged_attention.mosaic_gpu_decode import decode_attention
from pallas_kernels.paged_attention.mosaic_gpu_ops import WARPGROUP_ROWS
from pallas_kernels.paged_attention.mosaic_gpu_tiles import (
    NARROW_TYPES,
    SHARED_BYTES,
    WIDE_TYPES,
    GpuTiles,
    compute_type,
    default_tiles,
    fits_tiles,
)
from pallas_kernels.paged_attention.query_tiles import of_tokens, tokens_per_tile
from pallas_kernels.paged_attention.tuned import tuned

__all__ = ["attend", "prepare", "validate"]

POOL_TYPES = (*WIDE_TYPES, *NARROW_TYPES)
INSTRUCTIONS = {"9.0": "wgmma", "10.0": "tcgen05"}
"""By compute capability: H100 and H200, B200."""
HEAD_DIMS = {"wgmma": 256, "tcgen05": 128}
"""Up to here; beyond, registers spill."""


def validate(layout: PoolLayout, spec: AttentionSpec, tiles: GpuTiles | None = None) -> None:
    if layout.platform != "gpu":
        raise NotImplementedError(f"a pool of platform {layout.platform!r}, not 'gpu'")
    if (capability := compute_capability()) not in INSTRUCTIONS:
        raise NotImplementedError(
            f"compute capability {capability}: the kernels are written for {' and '.join(INSTRUCTIONS)} "
            "(H100 and H200, B200)"
        )
    if layout.dtype.name not in POOL_TYPES:
        raise NotImplementedError(f"a pool of {layout.dtype}, not {', '.join(POOL_TYPES)}")
    tiles = tiles or _default_tiles(layout)
    if layout.head_dim > (largest := HEAD_DIMS[tiles.instruction]):
        raise NotImplementedError(f"head_dim={layout.head_dim}: at most {largest} with {tiles.instruction}")
    for num_keys in (tiles.decode_keys, tiles.chunk_keys):
        if not fits_tiles(num_keys, layout.block_size):
            raise NotImplementedError(
                f"block_size={layout.block_size}: a multiple of 8 that divides the {num_keys} keys of a tile, "
                "or a multiple of them"
            )
    if spec.sliding_window is not None and spec.sliding_window < 1:
        raise ValueError(f"sliding_window={spec.sliding_window}: at least 1, or None")
    shared_bytes = {"decode": tiles.decode_shared_bytes(layout), "chunk": tiles.chunk_shared_bytes(layout)}
    for kernel, num_bytes in shared_bytes.items():
        if num_bytes > SHARED_BYTES:
            raise NotImplementedError(
                f"the {kernel} kernel's tiles take {num_bytes >> 10} KiB of {SHARED_BYTES >> 10} KiB of shared memory: "
                f"{tiles}"
            )


def attend(
    q,
    k,
    v,
    pool,
    layer,
    metadata: GpuMetadata,
    *,
    layout: PoolLayout,
    spec: AttentionSpec,
    sinks=None,
    k_scale=None,
    v_scale=None,
    tiles: GpuTiles | None = None,
    interpret=False,
):
    """See `api.paged_attention`.  `interpret` takes InterpretGPUParams in tests."""
    tiles = tiles or tuned(_default_tiles(layout), "mosaic_gpu", layout)
    static = {"layout": layout, "spec": spec, "tiles": tiles, "interpret": interpret}

    def chunks(q, pool, layer, logit_scales, metadata):
        group = q.shape[1] // layout.num_kv_heads
        size = tokens_per_tile(tiles.chunk_warpgroups * WARPGROUP_ROWS, group)
        chosen = metadata.query_tiles[size]
        out, log_sum = attend_chunks(q, pool, layer, logit_scales, metadata.tables, metadata.kv_lens, chosen, **static)
        return out, of_tokens(log_sum, chosen, size, group, q.shape[0])

    decode = functools.partial(decode_attention, **static)
    options = {"layout": layout, "spec": spec, "sinks": sinks, "k_scale": k_scale, "v_scale": v_scale}
    return gpu_step.attend(decode, chunks, compute_type(layout), q, k, v, pool, layer, metadata, **options)


def compute_capability() -> str:
    """Of the GPUs of this process; where there are none, as when compiling for one or interpreting, the assumed one."""
    try:
        return getattr(jax.devices("gpu")[0], "compute_capability", assumed_compute_capability)
    except RuntimeError:
        return assumed_compute_capability


assumed_compute_capability = "9.0"
"""Set by `pallas_kernels.targets` for the target that a process compiles for."""


def _default_tiles(layout: PoolLayout) -> GpuTiles:
    return default_tiles(layout, INSTRUCTIONS[compute_capability()])
