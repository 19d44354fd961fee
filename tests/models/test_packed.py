"""A GGUF file's matrices kept packed: float32's numbers in a sixth of the memory."""

from __future__ import annotations

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.models.layers import linear
from jserve.models.packed import PackedMatrix, can_pack, take_packed_rows
from jserve.models.quantized import take_rows
from jserve.weights.load import load_model
from pallas_kernels.cpu.ops import why_no_tiles
from pallas_kernels.cpu.packed_layout import tiled
from tests.support.smollm2 import smollm2_gguf

needs_tiles = pytest.mark.skipif(why_no_tiles() is not None, reason=f"{why_no_tiles()}")


@pytest.mark.parametrize("encoding", ["Q4_0", "Q4_1", "Q8_0"])
def test_rows_of_an_embedding_are_what_gguf_says(encoding):
    table = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)
    blocks = gguf.quantize(table, gguf.GGMLQuantizationType[encoding])
    ids = jnp.asarray([0, 63, 5, 5])
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType[encoding])[np.asarray(ids)]
    packed = PackedMatrix(jnp.asarray(tiled(blocks, encoding)), encoding)
    np.testing.assert_array_equal(take_packed_rows(packed, ids), expected)
    np.testing.assert_array_equal(take_rows(packed, ids, np.float32), expected)


def test_what_can_be_packed():
    assert can_pack("Q4_1", (64, 96))
    assert not can_pack("Q6_K", (64, 256))
    assert not can_pack("Q8_0", (40, 96))  # rows do not fill panels
    assert not can_pack("Q8_0", (96,))


def assert_close(ours: jax.Array, theirs: jax.Array) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=float(2e-6 * jnp.abs(theirs).max()))


@needs_tiles
def test_a_model_kept_packed_is_the_model_in_float32():
    packed = load_model(smollm2_gguf(), "float32", keep_packed=True)
    plain = load_model(smollm2_gguf(), "float32")
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(model.params)) for model in (packed, plain)]
    assert sizes[0] < sizes[1] / 5
    x = jax.random.normal(jax.random.key(0), (5, plain.config.d_model))
    for name in ("qkv", "attention_out", "gate_up"):
        ours, theirs = (jax.tree.map(lambda leaf: leaf[7], getattr(model.params.layers, name)) for model in (packed, plain))
        assert isinstance(ours, PackedMatrix)
        assert_close(linear(x, ours), linear(x, theirs))
    assert_close(linear(x, packed.params.embedding), linear(x, plain.params.embedding))
    ids = jnp.arange(0, plain.config.vocab_size, 97)
    for model in (packed, plain):
        np.testing.assert_array_equal(take_rows(model.params.embedding, ids, np.float32), plain.params.embedding[ids])


def test_models_stay_in_the_dtype_that_was_asked_for_where_packing_does_not_apply():
    for fields in ({"dtype": "bfloat16"}, {"dtype": "float32", "quantize": "int8"}):
        model = load_model(smollm2_gguf(), **fields, keep_packed=True)
        assert not any(leaf.dtype == jnp.uint8 for leaf in jax.tree.leaves(model.params))
