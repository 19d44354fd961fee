"""Block copies on TPU under the interpreter: what moves, what stays, in both DMA modes."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_copy import mosaic_tpu
from tests.support.tpu_interpreter import EAGER, LATE

MODES = pytest.mark.parametrize("mode", [LATE, EAGER], ids=["late", "eager"])


def some_pool(num_blocks=30):
    return jnp.asarray(np.random.default_rng(0).standard_normal((2, num_blocks, 2, 2, 16, 128)), jnp.float32)


@MODES
def test_copy_moves_the_counted_blocks_of_all_layers(mode):
    """More copies than are in flight at once; entries beyond the count are ignored."""
    pool = some_pool()
    sources, destinations = jnp.arange(1, 13), jnp.arange(13, 25)
    copied = mosaic_tpu.copy_blocks(pool, sources, destinations, jnp.int32(11), interpret=mode)
    np.testing.assert_array_equal(copied, pool.at[:, 13:24].set(pool[:, 1:12]))


@MODES
def test_gathered_blocks_scatter_into_other_blocks(mode):
    pool = some_pool()
    out = jnp.array([4, 2, 9, 1], jnp.int32)
    staging = mosaic_tpu.gather_blocks(pool, out, jnp.int32(3), interpret=mode)
    np.testing.assert_array_equal(staging[:3], jnp.moveaxis(pool, 1, 0)[out[:3]])
    back = jnp.array([20, 21, 22, 0], jnp.int32)
    restored = mosaic_tpu.scatter_blocks(pool, back, staging, jnp.int32(3), interpret=mode)
    np.testing.assert_array_equal(restored, pool.at[:, back[:3]].set(pool[:, out[:3]]))


def test_count_of_zero_changes_nothing():
    pool, none = some_pool(4), jnp.zeros(2, jnp.int32)
    np.testing.assert_array_equal(mosaic_tpu.copy_blocks(pool, none, none, jnp.int32(0), interpret=LATE), pool)
