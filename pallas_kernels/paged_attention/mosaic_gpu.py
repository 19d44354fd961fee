"""Ragged paged attention on GPU: decode rows and chunks as separate Pallas (Mosaic GPU) calls over one flat token axis.

    write       this step's keys and values go into their blocks: an XLA scatter, in place under donation
    decode      rows of one token attend, split over the chip and joined                        mosaic_gpu_decode
    chunks      tiles of the chunks' queries attend                                             mosaic_gpu_chunk

Written for Hopper (TMA and wgmma, compute capability 9.0).  Compiled for H100 and H200 and interpreted; not run on
hardware (docs/kernels-gpu.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.batch import AttentionSpec, RaggedBatch, TokenRows, token_rows
from pallas_kernels.paged_attention.layout import PoolLayout, pack, write_tokens
from pallas_kernels.paged_attention.mosaic_gpu_chunk import (
    TOKENS_PER_TILE,
    QueryTiles,
    attend_chunks,
    of_tokens,
    query_tiles,
    tokens_per_tile,
)
from pallas_kernels.paged_attention.mosaic_gpu_decode import decode_attention
from pallas_kernels.paged_attention.mosaic_gpu_tiles import (
    NARROW_TYPES,
    SHARED_BYTES,
    WIDE_TYPES,
    GpuTiles,
    compute_type,
    default_tiles,
    fits_tiles,
)
from pallas_kernels.paged_attention.tuned import tuned

POOL_TYPES = (*WIDE_TYPES, *NARROW_TYPES)
INSTRUCTIONS = {"9.0": "wgmma", "10.0": "tcgen05"}
"""By compute capability: H100 and H200, B200."""
HEAD_DIMS = {"wgmma": 256, "tcgen05": 128}
"""Up to here; beyond, registers spill."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GpuMetadata:
    """A step's geometry as the kernels walk it."""

    tokens: TokenRows
    tables: jax.Array  # i32[S, max_blocks]
    kv_lens: jax.Array  # i32[S]
    decode_lens: jax.Array  # i32[S]: 0 for rows that are no decode
    num_decodes: jax.Array  # i32[]: flat tokens before this one are decodes
    query_tiles: dict[int, QueryTiles]
    """By tokens a tile.  A step's geometry does not know how many query heads share a kv head: attend() takes one of
    these, and the compiler drops the others."""


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


def prepare(batch: RaggedBatch, num_tokens: int, layout: PoolLayout, spec: AttentionSpec) -> GpuMetadata:
    num_rows, max_blocks = batch.block_tables.shape
    # A row longer than its table would read past it: it is a bug of the caller, and is treated as padding.
    kv_lens = jnp.where(batch.kv_lens <= max_blocks * layout.block_size, batch.kv_lens, 0)
    is_decode = spec.decode_only | (jnp.arange(num_rows) < batch.num_decodes)
    sizes = () if spec.decode_only else TOKENS_PER_TILE
    return GpuMetadata(
        tokens=token_rows(batch, num_tokens, layout.block_size, spec),
        tables=batch.block_tables,
        kv_lens=kv_lens,
        decode_lens=jnp.where(is_decode, kv_lens, 0),
        num_decodes=batch.num_decodes,
        query_tiles={size: query_tiles(batch, num_tokens, size) for size in sizes},
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
    tokens = metadata.tokens
    pool = write_tokens(pool, layer, tokens.block, tokens.offset, pack(k, v, layout, k_scale, v_scale))
    tiles = tiles or tuned(_default_tiles(layout), "mosaic_gpu", layout)
    static = {"layout": layout, "spec": spec, "tiles": tiles, "interpret": interpret}

    num_tokens, num_heads, _ = q.shape
    per_head = lambda scale: jnp.repeat(jnp.broadcast_to(scale, layout.num_kv_heads), num_heads // layout.num_kv_heads)
    wide_q = jnp.pad(q.astype(compute_type(layout)), ((0, 0), (0, 0), (0, layout.lanes - layout.head_dim)))
    logit_scales = jnp.broadcast_to(jnp.float32(spec.scale) * (1 if k_scale is None else k_scale), layout.num_kv_heads)

    num_candidates = min(metadata.tables.shape[0], num_tokens)  # a decode's row and flat token have the same number
    candidates = metadata.tables[:num_candidates], metadata.decode_lens[:num_candidates]
    out, log_sum = decode_attention(wide_q[:num_candidates], pool, layer, logit_scales, *candidates, **static)
    if not spec.decode_only:
        group = num_heads // layout.num_kv_heads
        size = tokens_per_tile(tiles, group)
        chunks = metadata.query_tiles[size]
        geometry = metadata.tables, metadata.kv_lens, chunks
        chunked, chunk_log_sum = attend_chunks(wide_q, pool, layer, logit_scales, *geometry, **static)
        is_decode = jnp.arange(num_tokens)[:, None] < metadata.num_decodes
        padding = ((0, num_tokens - num_candidates), (0, 0))
        out = jnp.where(is_decode[..., None], jnp.pad(out, (*padding, (0, 0))), chunked)
        if sinks is not None:
            chunk_log_sum = of_tokens(chunk_log_sum, chunks, size, group, num_tokens)
            log_sum = jnp.where(is_decode, jnp.pad(log_sum, padding), chunk_log_sum)
    if sinks is not None:  # one more term of the denominator
        out = out * jax.nn.sigmoid(log_sum - sinks.astype(jnp.float32))[..., None]
    if v_scale is not None:
        out = out * per_head(v_scale)[:, None]
    is_live = (tokens.position >= 0)[:, None, None]
    return jnp.where(is_live, out[..., : layout.head_dim], 0).astype(q.dtype), pool


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
