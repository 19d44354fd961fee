"""One spec tree: it covers every parameter, initialises it, and says how a tensor-parallel split cuts it."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.models import llama
from jserve.models.config import ModelConfig, ModelError, RopeScaling
from jserve.models.layers import rope_table
from jserve.models.spec import (
    ParamSpec,
    Piece,
    checkpoint_tensors,
    init_params,
    leaves,
    num_bytes,
    num_parameters,
    zeros,
)

CONFIG = ModelConfig(
    family="llama",
    architecture="LlamaForCausalLM",
    num_layers=2,
    d_model=32,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    d_ff=48,
    vocab_size=64,
    norm_eps=1e-5,
    rope=RopeScaling(),
    tied=False,
    context_length=64,
    qkv_bias=True,
    attention_out_bias=True,
    mlp_bias=True,
)


@pytest.mark.parametrize("num_shards", [1, 2, 6])
def test_pieces_fill_every_element_exactly_once(num_shards):
    for spec in leaves(llama.param_specs(CONFIG, "float32", num_shards)):
        counts = np.zeros(spec.shape, np.int32)
        for _, piece, layer in checkpoint_tensors(spec):
            for copy in range(piece.copies):
                view = spec.view(counts, piece, layer, copy)
                assert (view.shape[0] * view.shape[1], *view.shape[2:]) == spec.checkpoint_shape(piece)
                view += 1
        assert (counts == 1).all()


def test_pieces_with_a_gap_are_a_mistake_in_the_spec():
    with pytest.raises(AssertionError):
        ParamSpec((8,), np.dtype(np.float32), ("embed",), zeros, (Piece("a", 1, 0, 3), Piece("b", 1, 4, 8)))


def test_a_tied_model_without_biases_has_no_leaves_for_them():
    plain = dataclasses.replace(CONFIG, tied=True, qkv_bias=False, attention_out_bias=False, mlp_bias=False)
    specs = llama.param_specs(plain, "bfloat16")
    assert len(leaves(specs)) == 8
    per_layer = 32 * 2 + 32 * (6 + 2 + 2) * 8 + 6 * 8 * 32 + 3 * 32 * 48
    assert num_parameters(specs) == 64 * 32 + 32 + 2 * per_layer
    assert num_bytes(specs) == 2 * num_parameters(specs)


def test_init_gives_the_shapes_and_dtypes_of_the_specs_and_differs_by_leaf():
    specs = llama.param_specs(CONFIG, "bfloat16")
    params = init_params(specs, jax.random.key(0))
    jax.tree.map(lambda spec, leaf: (spec.shape, spec.dtype) == (leaf.shape, leaf.dtype) or pytest.fail(str(spec)),
                 specs, params)  # fmt: skip
    assert (params.layers.attention_norm == 1).all() and (params.layers.qkv_bias == 0).all()
    assert not (params.embedding == params.head).any(axis=1).all()


def test_more_shards_than_kv_heads_repeat_them():
    """Six devices, two kv heads: each device has one query head and the kv head that it attends to."""
    whole = _first_layer(_filled(llama.param_specs(CONFIG, "float32"), np.random.default_rng(0))).qkv
    for_six = _first_layer(_filled(llama.param_specs(CONFIG, "float32", 6), np.random.default_rng(0))).qkv
    groups = whole.reshape(2, 5, 8, 32)  # three query heads, a key, a value
    for device, part in enumerate(np.split(for_six, 6)):
        query, key, value = part.reshape(3, 8, 32)
        np.testing.assert_array_equal(query, groups[device // 3, device % 3])
        np.testing.assert_array_equal(key, groups[device // 3, 3])
        np.testing.assert_array_equal(value, groups[device // 3, 4])


def test_parameters_of_one_order_become_those_of_another():
    stored = llama.param_specs(CONFIG, "float32")
    specs = llama.param_specs(CONFIG, "float32", 6)
    arrays = _filled(stored, np.random.default_rng(0))
    wanted = _filled(specs, np.random.default_rng(0))
    got = jax.tree.map(lambda spec, other, array: spec.reordered(array, other), specs, stored, arrays)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def test_a_split_of_the_fused_axes_is_a_model_of_fewer_heads():
    """Halves by plain slicing: each computes its own heads and ffn, and the halves' outputs add up to the whole."""
    rng = np.random.default_rng(0)
    whole = _first_layer(_filled(llama.param_specs(CONFIG, "float32"), rng))
    specs = llama.param_specs(CONFIG, "float32", num_shards=2)
    for_two = _first_layer(_filled(specs, np.random.default_rng(0)))
    halves = [jax.tree.map(lambda leaf, spec: _half(leaf, spec, index), for_two, specs.layers) for index in range(2)]
    x = jnp.asarray(rng.standard_normal((5, CONFIG.d_model), np.float32))
    half_config = dataclasses.replace(CONFIG, num_heads=3, num_kv_heads=1, d_ff=24)

    @partial(jax.jit, static_argnums=1)
    def outputs(layer: llama.LlamaLayers, config: ModelConfig):
        rope = rope_table(config.rope, config.head_dim, jnp.arange(5))
        without_bias = dataclasses.replace(layer, down_bias=None)  # which a sum over shards counts once
        return llama._qkv(x, layer, config, rope), llama._mlp(x, without_bias, config)

    heads, mlp = outputs(whole, CONFIG)
    (heads_0, mlp_0), (heads_1, mlp_1) = (outputs(half, half_config) for half in halves)
    for all_heads, first, second in zip(heads, heads_0, heads_1):
        np.testing.assert_allclose(all_heads, np.concatenate([first, second], axis=1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(mlp, mlp_0 + mlp_1, rtol=1e-5, atol=1e-4)


def _filled(specs, rng: np.random.Generator):
    """Parameters from random checkpoint tensors, which do not depend on how the specs order them."""

    def fill(spec: ParamSpec) -> np.ndarray:
        array = np.empty(spec.shape, spec.dtype)
        for _, piece, layer in checkpoint_tensors(spec):
            tensor = rng.standard_normal(spec.checkpoint_shape(piece), np.float32)
            for copy in range(piece.copies):
                view = spec.view(array, piece, layer, copy)
                view[:] = tensor.reshape(view.shape)
        return array

    return jax.tree.map(fill, specs)


def _first_layer(params: llama.LlamaParams) -> llama.LlamaLayers:
    return jax.tree.map(lambda leaf: leaf[0], params.layers)


def _half(leaf: np.ndarray, spec: ParamSpec, index: int) -> np.ndarray:
    split = [axis for axis, name in enumerate(spec.logical_axes[1:]) if name in ("kv_heads", "heads", "ffn")]
    return np.split(leaf, 2, axis=split[0])[index] if split else leaf


@pytest.mark.parametrize("num_shards, reason", [(4, "6 heads and an ffn of 48"), (3, "2 kv heads neither divide")])
def test_shards_that_do_not_divide_are_refused(num_shards, reason):
    with pytest.raises(ModelError, match=f"tensor_parallel_size = {num_shards}: {reason}"):
        llama.param_specs(CONFIG, "float32", num_shards=num_shards)
