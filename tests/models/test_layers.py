"""Rotary frequencies as transformers computes them; norm and layer loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.models.config import RopeScaling, from_hf
from jserve.models.layers import apply_rope, inverse_frequencies, linear, rms_norm, rope_table
from jserve.models.run_layers import run_layers
from tests.models.test_model_config import LLAMA, LLAMA3_SCALING


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 100000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {**LLAMA3_SCALING, "rope_theta": 500000.0},
        {**LLAMA3_SCALING, "rope_theta": 500000.0, "factor": 32.0, "original_max_position_embeddings": 512},
    ],
)
def test_inverse_frequencies_are_those_of_transformers(parameters):
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    settings = {**LLAMA, "head_dim": 128, "rope_parameters": parameters, "max_position_embeddings": 8192}
    expected = LlamaRotaryEmbedding(LlamaConfig(**settings)).inv_freq.numpy()
    ours = inverse_frequencies(from_hf(settings).rope, 128)
    np.testing.assert_allclose(ours, expected, rtol=1e-6)  # float32 roundings: pow differs between libraries


def test_rope_turns_pairs_by_position_and_keeps_lengths():
    x = jax.random.normal(jax.random.key(0), (3, 1, 2, 8))
    turned = apply_rope(x, rope_table(RopeScaling(), 8, jnp.array([0, 1, 5000])))
    np.testing.assert_allclose(turned[0], x[0], rtol=1e-6)
    angle = 5000.0  # frequency 0 is 1
    expected = x[2, 0, 0, 0] * np.cos(angle) - x[2, 0, 0, 4] * np.sin(angle)
    np.testing.assert_allclose(turned[2, 0, 0, 0], expected, rtol=1e-4)
    np.testing.assert_allclose(jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5)


def test_rope_angles_are_float32_in_a_bfloat16_model():
    cos, sin = rope_table(RopeScaling(), 8, jnp.array([4097]))
    assert cos.dtype == sin.dtype == jnp.float32
    np.testing.assert_allclose(cos[0, 0], np.cos(4097.0), atol=1e-5)  # 4097 is no bfloat16
    assert apply_rope(jnp.ones((1, 1, 1, 8), jnp.bfloat16), (cos, sin)).dtype == jnp.bfloat16


def test_norm_statistics_are_float32_in_a_bfloat16_model():
    x = jnp.full((1, 4096), 256.0, jnp.bfloat16)
    assert (rms_norm(x, jnp.ones(4096, jnp.bfloat16), 1e-5) == 1).all()


def test_linear_accumulates_in_float32_and_returns_the_input_dtype():
    x, weight = jnp.full((1, 4096), 1 / 64, jnp.bfloat16), jnp.full((2, 4096), 1 / 64, jnp.bfloat16)
    y = linear(x, weight, jnp.array([0.0, 2.0], jnp.bfloat16))
    assert y.dtype == jnp.bfloat16 and y.tolist() == [[1.0, 3.0]]


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_every_platform_runs_the_layers_in_order(platform):
    weights = {"scale": jnp.array([2.0, 3.0, 5.0])}

    def layer(carry, weight, group, index):
        x, seen = carry
        return x * weight["scale"] + index, seen.at[index].set(x)

    final, seen = jax.jit(lambda w: run_layers(layer, (jnp.float32(1), jnp.zeros(3)), w, (0, 0, 0), platform))(weights)
    assert float(final) == ((1 * 2 + 0) * 3 + 1) * 5 + 2 and seen.tolist() == [1, 2, 7]
