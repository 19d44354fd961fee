"""Ragged paged attention on TPU: decode rows and chunks as separate Pallas calls over one flat token axis.

    decode      each decode row writes its new token and attends                              mosaic_tpu_decode
    write       the chunks' new keys and values go into their blocks                          mosaic_tpu_write
    chunks      tiles of the chunks' queries attend, after the write                          mosaic_tpu_chunk

All three alias the pool: it is never copied and never scattered into.  Compiled for v4 to tpu7x and interpreted; not
run on hardware (docs/kernels-tpu.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.batch import AttentionSpec, RaggedBatch
from pallas_kernels.paged_attention.layout import PoolLayout, pack
from pallas_kernels.paged_attention.mosaic_tpu_chunk import ChunkTiles, attend_chunks, chunk_tiles
from pallas_kernels.paged_attention.mosaic_tpu_decode import decode_attention
from pallas_kernels.paged_attention.mosaic_tpu_tiles import TpuTiles, default_tiles
from pallas_kernels.paged_attention.mosaic_tpu_write import ChunkWrites, chunk_writes, write_chunks
from pallas_kernels.paged_attention.tuned import tuned

POOL_TYPES = (jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TpuMetadata:
    """A step's geometry as the kernels walk it."""

    tables: jax.Array  # i32[S, 1, max_blocks]
    decode_lens: jax.Array  # i32[S]: 0 for rows that are no decode
    num_decode_rows: jax.Array  # i32[]: the decode kernel's grid
    num_decode_tokens: jax.Array  # i32[]: flat tokens before this one are decodes
    num_tokens: jax.Array  # i32[]: flat tokens from this one on are padding
    writes: ChunkWrites | None  # None: decode only
    chunks: ChunkTiles | None


def validate(layout: PoolLayout, spec: AttentionSpec) -> None:
    if layout.platform != "tpu":
        raise NotImplementedError(f"a pool of platform {layout.platform!r}, not 'tpu'")
    if layout.dtype not in [jnp.dtype(t) for t in POOL_TYPES]:
        raise NotImplementedError(f"a pool of {layout.dtype}, not {', '.join(jnp.dtype(t).name for t in POOL_TYPES)}")
    if layout.block_size % 16 or not 16 <= layout.block_size <= 256:
        raise NotImplementedError(f"block_size={layout.block_size}: multiples of 16 from 16 to 256")
    if layout.head_dim > 256:
        raise NotImplementedError(f"head_dim={layout.head_dim}: at most 256")
    if spec.sliding_window is not None and spec.sliding_window < 1:
        raise ValueError(f"sliding_window={spec.sliding_window}: at least 1, or None")


def prepare(
    batch: RaggedBatch, num_tokens: int, layout: PoolLayout, spec: AttentionSpec, tiles: TpuTiles | None = None
) -> TpuMetadata:
    num_rows, max_blocks = batch.block_tables.shape
    row = jnp.arange(num_rows, dtype=jnp.int32)
    # A row longer than its table would read past it: it is a bug of the caller, and is treated as padding.
    kv_lens = jnp.where(batch.kv_lens <= max_blocks * layout.block_size, batch.kv_lens, 0)
    tables = batch.block_tables.reshape(num_rows, 1, max_blocks)
    if spec.decode_only:
        if num_tokens != num_rows:
            raise ValueError(f"decode_only needs one token a row, got {num_tokens} tokens and {num_rows} rows")
        num_live = jnp.max(jnp.where(kv_lens > 0, row + 1, 0))
        return TpuMetadata(tables, kv_lens, num_live, num_live, num_live, None, None)
    decode_lens = jnp.where(row < batch.num_decodes, kv_lens, 0)
    tiles = tiles or tuned(default_tiles(layout), "mosaic_tpu", layout)
    return TpuMetadata(
        tables=tables,
        decode_lens=decode_lens,
        num_decode_rows=batch.num_decodes,
        num_decode_tokens=batch.num_decodes,
        num_tokens=batch.cu_q_lens[-1],
        writes=chunk_writes(batch, kv_lens, num_tokens, layout),
        chunks=chunk_tiles(batch, kv_lens, num_tokens, tiles.query_tile),
    )


def attend(
    q,
    k,
    v,
    pool,
    layer,
    metadata: TpuMetadata,
    *,
    layout: PoolLayout,
    spec: AttentionSpec,
    sinks=None,
    k_scale=None,
    v_scale=None,
    tiles: TpuTiles | None = None,
    interpret=False,
):
    """See `api.paged_attention`.  `tiles` as in `prepare`; `interpret` takes pltpu.InterpretParams in tests."""
    num_tokens = q.shape[0]
    num_rows = metadata.tables.shape[0]
    defaults = default_tiles(layout, q.shape[1] // layout.num_kv_heads, q.dtype.itemsize)
    tiles = tiles or tuned(defaults, "mosaic_tpu", layout)
    new = pack(k, v, layout, k_scale, v_scale)
    static = {"layout": layout, "spec": spec, "tiles": tiles, "interpret": interpret}
    shared = static | {"sinks": sinks, "k_scale": k_scale, "v_scale": v_scale}

    num_candidates = min(num_rows, num_tokens)  # a decode's row and flat token have the same number
    decoded, pool = decode_attention(
        q[:num_candidates],
        new[:num_candidates],
        pool,
        layer,
        metadata.tables[:num_candidates],
        metadata.decode_lens[:num_candidates],
        metadata.num_decode_rows,
        **shared,
    )
    token = jnp.arange(num_tokens, dtype=jnp.int32)[:, None, None]
    if spec.decode_only:
        return jnp.where(token < metadata.num_decode_tokens, decoded, 0), pool
    pool = write_chunks(new, pool, layer, metadata.writes, layout=layout, interpret=interpret)
    out = attend_chunks(q, pool, layer, metadata.tables, metadata.chunks, **shared)
    decoded = jnp.pad(decoded, ((0, num_tokens - num_candidates), (0, 0), (0, 0)))
    out = jnp.where(token < metadata.num_decode_tokens, decoded, out)
    return jnp.where(token < metadata.num_tokens, out, 0), pool
