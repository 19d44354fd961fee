"""Functions of single rows, computed in tiles of a fixed number of rows: how a row's bits stay the same in every step.

The rounding of a matrix product depends on how many rows it has (on CPU one row differs from two or more; elsewhere the
compiler picks a kernel by shape).  A loop over tiles gives every row the same product whatever else is in the step, and
its work follows the rows that are used.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def in_tiles(function: Callable, *arrays, num_rows: jax.Array, tile: int | None):
    """function(*arrays) for a function whose result's row i depends on row i of every array (or tree of arrays) only.

    Args:
      arrays: [R, ...]
      num_rows: i32[], rows that are used; the tiles behind them are left zero.
      tile: rows a call; None: all at once.
    """
    if tile is None:
        return function(*arrays)
    num_all = jax.tree.leaves(arrays)[0].shape[0]
    padded = -num_all % tile
    arrays = jax.tree.map(lambda x: jnp.pad(x, ((0, padded), *[(0, 0)] * (x.ndim - 1))), arrays)
    cut = lambda start: jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, tile), arrays)
    shapes = jax.eval_shape(lambda: function(*cut(0)))
    results = jax.tree.map(lambda one: jnp.zeros((num_all + padded, *one.shape[1:]), one.dtype), shapes)

    def one_tile(index, results):
        of_tile = function(*cut(index * tile))
        return jax.tree.map(
            lambda all_, one: jax.lax.dynamic_update_slice_in_dim(all_, one, index * tile, 0), results, of_tile
        )

    results = jax.lax.fori_loop(0, (num_rows + tile - 1) // tile, one_tile, results)
    return jax.tree.map(lambda x: x[:num_all], results)
