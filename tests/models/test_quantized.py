"""int8 matrices: what they are, where they come from, and that a model of them runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.models.layers import linear
from jserve.models.quantized import QuantizedMatrix, quantize_rows, take_rows
from jserve.models.registry import model_code
from jserve.models.spec import leaves, num_bytes, num_parameters, shapes
from jserve.parallel.placement import on_devices
from jserve.weights.load import load_model
from tests.support.tiny_models import full_logits, random_gguf


def quantized(matrix: np.ndarray) -> QuantizedMatrix:
    values, scales = np.empty(matrix.shape, np.int8), np.empty(matrix.shape[:-1], np.float32)
    quantize_rows(matrix, values, scales)
    return QuantizedMatrix(jnp.asarray(values), jnp.asarray(scales))


@pytest.mark.parametrize("num_rows", [1, 7, 8, 33])
def test_a_product_is_off_by_the_rounding_of_both_sides_and_no_more(num_rows):
    rng = np.random.default_rng(num_rows)
    x, weight = rng.standard_normal((num_rows, 96), np.float32), rng.standard_normal((40, 96), np.float32)
    got = np.asarray(linear(jnp.asarray(x), quantized(weight)))
    # Each factor is off by at most half a step of its row's scale, of 254 steps where it has two digits.
    step_x = np.abs(x).max(1, keepdims=True) / 254 / 254
    step_w = np.abs(weight).max(1) / 254
    bound = step_x * np.abs(weight).sum(1) + step_w * np.abs(x).sum(1, keepdims=True) + 96 * step_x * step_w
    assert (np.abs(got - x @ weight.T) <= bound).all()
    assert np.abs(got - x @ weight.T).max() > 0  # it is the 8-bit product, not the float one


def test_a_row_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((9, 64), np.float32), quantized(rng.standard_normal((16, 64), np.float32))
    whole = np.asarray(jax.jit(linear)(jnp.asarray(x), weight))
    alone = np.concatenate([np.asarray(jax.jit(linear)(jnp.asarray(x[i : i + 1]), weight)) for i in range(9)])
    np.testing.assert_array_equal(whole, alone)


def test_zero_rows_stay_zero_and_rows_of_a_table_are_their_values():
    matrix = np.array([[0, 0, 0], [127, -64, 1]], np.float32)
    table = quantized(matrix)
    assert take_rows(table, jnp.array([1, 0, 1]), jnp.float32).tolist() == matrix[[1, 0, 1]].tolist()
    assert linear(jnp.zeros((1, 3)), table).tolist() == [[0, 0]]


def test_loading_quantizes_every_matrix_and_the_model_still_says_much_the_same(tmp_path):
    path = tmp_path / "model.gguf"
    random_gguf(path)
    exact, small = load_model(path, "float32"), load_model(path, "float32", quantize="int8")
    layers = small.params.layers
    for matrix in (layers.qkv, layers.attention_out, layers.gate_up, layers.down, small.params.embedding):
        assert isinstance(matrix, QuantizedMatrix) and matrix.values.dtype == jnp.int8
    np.testing.assert_array_equal(layers.attention_norm, exact.params.layers.attention_norm)
    restored = np.asarray(layers.down.values, np.float32) * np.asarray(layers.down.scales)[..., None]
    assert np.abs(restored - exact.params.layers.down).max() <= np.abs(exact.params.layers.down).max() / 253

    specs = model_code(small.config).param_specs(small.config, "float32", quantize="int8")
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), small.params) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), shapes(specs, on_devices(jax.devices()[:1]))
    )
    assert num_bytes(specs) == sum(leaf.nbytes for leaf in jax.tree.leaves(small.params))
    float_specs = model_code(small.config).param_specs(small.config, "float32")
    assert num_parameters(specs) == num_parameters(float_specs) and len(leaves(specs)) == len(leaves(float_specs))

    tokens = [1, 5, 9, 2, 7, 3]
    ours, theirs = (np.asarray(full_logits(model.params, model.config, tokens)) for model in (small, exact))
    error = np.abs(ours - theirs).max() / theirs.std()
    assert 0 < error < 0.1
