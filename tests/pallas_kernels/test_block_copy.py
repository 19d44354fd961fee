"""Block copies against numpy, in place, with entries beyond the count ignored."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks

SHAPE = (3, 9, 2, 2, 4, 8)  # layers, blocks, kv heads, planes, block size, lanes


@pytest.fixture
def pool():
    return np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_copied_blocks_hold_their_source_and_others_are_untouched(pool, count):
    sources, destinations = np.array([2, 3, 2, 8]), np.array([5, 6, 7, 1])
    copied = jax.jit(copy_blocks, static_argnames="platform")(pool, sources, destinations, count, platform="cpu")
    expected = pool.copy()
    expected[:, destinations[:count]] = pool[:, sources[:count]]
    np.testing.assert_array_equal(copied, expected)


def test_gathered_blocks_come_back_where_they_are_scattered(pool):
    blocks = jnp.array([4, 1, 8, 3])
    staging = gather_blocks(jnp.asarray(pool), blocks, 3, platform="cpu")
    np.testing.assert_array_equal(staging[:3], np.moveaxis(pool[:, blocks[:3]], 1, 0))
    other = jnp.zeros(SHAPE, jnp.float32)
    restored = np.asarray(scatter_blocks(other, blocks, staging, 3, platform="cpu"))
    np.testing.assert_array_equal(restored[:, blocks[:3]], pool[:, blocks[:3]])
    assert not restored[:, [0, 2, 3, 5, 6, 7]].any()


def test_a_donated_pool_is_not_copied():
    pool = jax.ShapeDtypeStruct((4, 300, *SHAPE[2:]), jnp.float32)
    pairs = jax.ShapeDtypeStruct((8,), jnp.int32)
    program = jax.jit(copy_blocks, static_argnames="platform", donate_argnums=0)
    memory = program.lower(pool, pairs, pairs, jax.ShapeDtypeStruct((), jnp.int32), platform="cpu").compile()
    analysis = memory.memory_analysis()
    size = 4 * 300 * np.prod(SHAPE[2:]) * 4
    assert analysis.alias_size_in_bytes == size and analysis.temp_size_in_bytes < size / 50
