"""Ragged paged attention on GPU by Pallas Triton: for cards that the Mosaic GPU kernels are not written for.

Those are Ampere and Ada (A100, L4) and, on the others, heads of 256 on Blackwell and blocks of any size.  Compiled for A100,
L4, H100 and B200 and interpreted; not run on hardware (docs/kernels-gpu.md).  JAX has deprecated Pallas Triton since 0.11:
where a release no longer has it `xla` serves, and the log says so.
"""

from __future__ import annotations

import functools

from pallas_kernels.paged_attention import gpu_step, mosaic_gpu
from pallas_kernels.paged_attention.batch import AttentionSpec
from pallas_kernels.paged_attention.gpu_step import GpuMetadata, prepare
from pallas_kernels.paged_attention.layout import PoolLayout
from pallas_kernels.paged_attention.query_tiles import tokens_per_tile

try:
    from pallas_kernels.paged_attention.triton_kernels import TritonTiles, attend_chunks, decode_attention
except ImportError:  # a release of jax without it
    TritonTiles = None

__all__ = ["attend", "prepare", "validate"]

POOL_TYPES = ("bfloat16", "float16")
"""Of 8 bits: not built.  JAX's offsets into arrays of 2 to 4 GiB are 32 bits, counted in elements, and would overflow."""
LARGEST_HEAD = 256


def validate(layout: PoolLayout, spec: AttentionSpec) -> None:
    if TritonTiles is None:
        raise NotImplementedError("this jax has no Pallas Triton")
    if layout.platform != "gpu":
        raise NotImplementedError(f"a pool of platform {layout.platform!r}, not 'gpu'")
    if float(capability := mosaic_gpu.compute_capability()) < 8:
        raise NotImplementedError(f"compute capability {capability}: the kernels need 8.0, with mma.sync of 16 bits")
    if layout.dtype.name not in POOL_TYPES:
        raise NotImplementedError(f"a pool of {layout.dtype}, not {', '.join(POOL_TYPES)}")
    if layout.head_dim > LARGEST_HEAD:
        raise NotImplementedError(f"head_dim={layout.head_dim}: at most {LARGEST_HEAD}")
    if spec.sliding_window is not None and spec.sliding_window < 1:
        raise ValueError(f"sliding_window={spec.sliding_window}: at least 1, or None")


def default_tiles(layout: PoolLayout) -> TritonTiles:
    """Heads of 256 leave room for half as many keys; for those of 64 jax 0.12's compiler spills where it takes 64 at a time."""
    if layout.lanes > 128:
        return TritonTiles(decode_rows=16, decode_keys=32, chunk_keys=32, chunk_warps=8)
    return TritonTiles(chunk_keys=32 if layout.lanes <= 64 else TritonTiles.chunk_keys)


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
    tiles: TritonTiles | None = None,
    interpret: bool = False,
):
    """See `api.paged_attention`."""
    tiles = tiles or default_tiles(layout)
    static = {"layout": layout, "spec": spec, "tiles": tiles, "interpret": interpret}

    def chunks(q, pool, layer, logit_scales, metadata):
        group = q.shape[1] // layout.num_kv_heads
        size = tokens_per_tile(max(tiles.chunk_rows, group), group)
        geometry = metadata.tables, metadata.kv_lens, metadata.query_tiles[size]
        return attend_chunks(q, pool, layer, logit_scales, *geometry, tokens_a_tile=size, **static)

    decode = functools.partial(decode_attention, **static)
    options = {"layout": layout, "spec": spec, "sinks": sinks, "k_scale": k_scale, "v_scale": v_scale}
    return gpu_step.attend(decode, chunks, layout.dtype, q, k, v, pool, layer, metadata, **options)
