"""Pools of every type: what is written comes back as near as the type allows, whatever lies beside it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import AttentionSpec, RaggedBatch, layout, paged_attention, prepare
from pallas_kernels.paged_attention.layout import SCALE_BYTES, pack, read_blocks, write_tokens

KINDS = {
    "float32": ("float32", False, 0.0),
    "float16": ("float16", False, 2**-11),
    "bfloat16": ("bfloat16", False, 2**-8),
    "int8": ("int8", True, 1.01 / 254),  # of the largest of its head
    "fp8": ("float8_e4m3fn", True, 2**-4),
}


def pool_of(kind: str, head_dim: int = 24, block_size: int = 8):
    dtype, scaled, error = KINDS[kind]
    return layout("cpu", 2, head_dim, block_size, dtype, scaled), error


@pytest.mark.parametrize("kind", KINDS)
def test_each_key_and_value_comes_back_whatever_its_size(kind):
    pool_layout, error = pool_of(kind)
    rng = np.random.default_rng(0)
    sizes = 10.0 ** rng.uniform(-3, 3, (2, 16, 2, 1)).astype(np.float32)
    k, v = rng.standard_normal((2, 16, 2, 24), np.float32) * sizes
    k[3] = v[5] = 0
    pool = pool_layout.allocate(1, 4)
    blocks, offsets = jnp.repeat(jnp.array([3, 1]), 8), jnp.tile(jnp.arange(8), 2)
    for half in (slice(0, 11), slice(11, 16)):  # what comes later changes nothing before it
        tokens = pack(jnp.asarray(k[half]), jnp.asarray(v[half]), pool_layout)
        pool = write_tokens(pool, 0, blocks[half], offsets[half], tokens)
    for wrote, read in zip((k, v), read_blocks(pool, 0, jnp.array([3, 1]), pool_layout)):
        read = np.moveaxis(np.asarray(read), 1, 2).reshape(16, 2, 24)
        bound = error * np.abs(wrote).max(-1, keepdims=True) + 1e-30
        assert (np.abs(read - wrote) <= bound).all()
        assert np.abs(read - wrote).max() > 0 or kind == "float32"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [16, 80])
def test_attention_is_that_of_the_reference_over_the_same_pool(kind, head_dim):
    pool_layout, _ = pool_of(kind, head_dim)
    rng = np.random.default_rng(1)
    lens, q_lens = [9, 30, 17], [1, 1, 12]
    spec = AttentionSpec(head_dim**-0.5, sliding_window=11)
    batch = RaggedBatch(
        jnp.array([[1, 2, 0, 0], [3, 4, 5, 6], [7, 8, 9, 0]], jnp.int32),
        jnp.array(lens, jnp.int32),
        jnp.array(np.cumsum([0, *q_lens]), jnp.int32),
        jnp.int32(2),
    )
    stored = pack(*jnp.asarray(rng.standard_normal((2, 80, 2, head_dim), np.float32)), pool_layout)
    pool = write_tokens(
        pool_layout.allocate(2, 10), 1, jnp.arange(80) // 8, jnp.arange(80) % 8, stored
    )
    q = jnp.asarray(rng.standard_normal((sum(q_lens), 4, head_dim), np.float32))
    k, v = jnp.asarray(rng.standard_normal((2, sum(q_lens), 2, head_dim), np.float32))
    results = []
    for implementation in ("reference", "xla"):
        metadata = prepare(batch, sum(q_lens), pool_layout, spec, implementation)
        results.append(
            paged_attention(q, k, v, pool, 1, metadata, layout=pool_layout, spec=spec, implementation=implementation)
        )
    np.testing.assert_allclose(results[0][0], results[1][0], atol=2e-5)
    np.testing.assert_array_equal(results[0][1][:, 1:], results[1][1][:, 1:])  # the dead block may hold anything


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "float32"])
def test_a_step_touches_only_what_it_writes(kind):
    """A scatter that converts the whole pool, as XLA's of bfloat16 on CPU, would take memory of its size."""
    pool_layout, _ = pool_of(kind, 64, 32)
    pool = jax.ShapeDtypeStruct(pool_layout.shape(2, 2000), pool_layout.storage_dtype)
    tokens = jax.ShapeDtypeStruct((4, 2, 64), jnp.float32)

    def write(pool, k, v):
        return write_tokens(pool, 1, jnp.arange(4), jnp.arange(4), pack(k, v, pool_layout))

    memory = jax.jit(write, donate_argnums=0).lower(pool, tokens, tokens).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pool_layout.bytes_per_block(2) * 2000
    assert memory.temp_size_in_bytes < pool_layout.bytes_per_block(2) * 20


def test_bytes_of_a_token():
    sizes = {kind: pool_of(kind, 64, 1)[0].bytes_per_block(1) for kind in KINDS}
    assert sizes == {"float32": 1024, "float16": 512, "bfloat16": 512, "int8": 256 + 4 * SCALE_BYTES, "fp8": 264}


def test_scales_are_for_eight_bits_on_cpu():
    with pytest.raises(ValueError, match="only 8-bit pools are scaled"):
        layout("cpu", 2, 64, 16, "bfloat16", scaled=True)
    with pytest.raises(NotImplementedError, match="platform='gpu'"):
        layout("gpu", 2, 64, 16, "int8", scaled=True)


def test_values_beyond_float16_stay_finite():
    pool_layout, _ = pool_of("float16")
    huge = jnp.full((1, 2, 24), 1e6)
    pool = write_tokens(pool_layout.allocate(1, 2), 0, jnp.array([1]), jnp.array([0]), pack(huge, -huge, pool_layout))
    keys, values = read_blocks(pool, 0, jnp.array([1]), pool_layout)
    assert float(keys[0, 0, 0, 0]) == 65504.0 and float(values[0, 0, 0, 0]) == -65504.0
