"""Tiles of a chunk's queries as the GPU kernels walk them: each of one sequence, anywhere on the flat token axis."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.batch import RaggedBatch

TOKENS_PER_TILE = (128, 64, 42, 32, 25, 21, 18, 16, 8, 4, 2, 1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QueryTiles:
    """Tiles of flat tokens of one sequence, W of them; those that are not used have length 0."""

    row: jax.Array  # i32[W]: the sequence
    token: jax.Array  # i32[W]: flat token of the tile's first row
    position: jax.Array  # i32[W]: its absolute position
    count: jax.Array  # i32[W]: tokens


def query_tiles(batch: RaggedBatch, num_tokens: int, tokens_a_tile: int) -> QueryTiles:
    num_rows = batch.kv_lens.shape[0]
    q_lens = jnp.diff(batch.cu_q_lens)
    is_chunk = (jnp.arange(num_rows) >= batch.num_decodes) & (batch.kv_lens > 0)
    tiles_of_row = jnp.where(is_chunk, (q_lens + tokens_a_tile - 1) // tokens_a_tile, 0)
    ends = jnp.cumsum(tiles_of_row)
    tile = jnp.arange(num_tokens // tokens_a_tile + min(num_rows, num_tokens), dtype=jnp.int32)
    row = jnp.searchsorted(ends, tile, side="right", method="compare_all").astype(jnp.int32)
    is_used = row < num_rows
    row = jnp.where(is_used, row, 0)
    offset = (tile - (ends - tiles_of_row)[row]) * tokens_a_tile
    count = jnp.where(is_used, jnp.clip(q_lens[row] - offset, 0, tokens_a_tile), 0)
    return QueryTiles(row, batch.cu_q_lens[row] + offset, batch.kv_lens[row] - q_lens[row] + offset, count)


def tokens_per_tile(rows: int, group: int) -> int:
    """The most tokens, of those that tiles are prepared for, whose query heads fit the `rows` of a tile."""
    if group > rows:
        raise NotImplementedError(f"{group} query heads a kv head: at most {rows}")
    return next(size for size in TOKENS_PER_TILE if size * group <= rows)


def of_tokens(by_tile: jax.Array, tiles: QueryTiles, tokens_a_tile: int, group: int, num_tokens: int) -> jax.Array:
    """[W, K, rows of a tile] -> [T, N]: what each token's query heads got; anything for tokens of no chunk."""
    num_tiles, num_kv_heads, _ = by_tile.shape
    token = tiles.token[:, None] + jnp.arange(tokens_a_tile)
    token = jnp.where(jnp.arange(tokens_a_tile) < tiles.count[:, None], token, num_tokens)
    place = jnp.zeros(num_tokens, jnp.int32).at[token.reshape(-1)].set(jnp.arange(token.size), mode="drop")
    by_tile = by_tile[..., : tokens_a_tile * group].reshape(num_tiles, num_kv_heads, tokens_a_tile, group)
    return jnp.moveaxis(by_tile, 1, 2).reshape(token.size, -1)[place]
