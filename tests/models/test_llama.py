"""The Llama family against transformers, from checkpoints on disk; and step by step against all at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.models import llama
from jserve.models.inputs import AttentionPlan, ForwardInputs
from jserve.weights.load import load_model
from pallas_kernels.paged_attention import RaggedBatch, layout
from tests.models.test_model_config import LLAMA3_SCALING
from tests.support.tiny_models import full_logits, random_gguf, transformers_llama, transformers_logits, write_gguf

TOKENS = np.random.default_rng(7).integers(0, 96, 70).tolist()
# Wavelengths of head_dim 16 and theta 100: 6 to 350 positions, on both sides of the 40 / 4 to 40 / 1 blend.
LLAMA3 = {**LLAMA3_SCALING, "rope_theta": 100.0, "original_max_position_embeddings": 40}

HF_VARIANTS = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "sharded": {"max_shard_size": "40KB"},
    "sharded-tied": {"max_shard_size": "40KB", "tie_word_embeddings": True},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "llama3": {"rope_parameters": LLAMA3},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head_dim": {"head_dim": 24},
    "one-kv-head": {"num_key_value_heads": 1},
    "as-many-kv-heads": {"num_key_value_heads": 4},
}


@pytest.mark.parametrize("variant", HF_VARIANTS)
def test_safetensors_give_the_logits_of_transformers(tmp_path, variant):
    pytest.importorskip("transformers")
    model = transformers_llama(tmp_path, **HF_VARIANTS[variant])
    if variant.startswith("sharded"):
        assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    loaded = load_model(tmp_path, "float32")
    ours = full_logits(loaded.params, loaded.config, TOKENS)
    np.testing.assert_allclose(ours, transformers_logits(model, TOKENS), atol=1e-4)


def test_mistral_without_a_window_gives_the_logits_of_transformers(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=128, sliding_window=None, initializer_range=0.2,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, "float32")
    ours = full_logits(loaded.params, loaded.config, TOKENS)
    np.testing.assert_allclose(ours, transformers_logits(model, TOKENS), atol=1e-4)


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory):
    """A transformers model and its tensors, to write as GGUF: three q heads to a kv head."""
    pytest.importorskip("transformers")
    settings = dict(num_attention_heads=6, num_key_value_heads=2, head_dim=32, hidden_size=96, tie_word_embeddings=True)
    model = transformers_llama(tmp_path_factory.mktemp("hf"), **settings)
    tensors = {name: value.numpy() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    return model, tensors


@pytest.mark.parametrize("encoding", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_gguf_gives_the_logits_of_transformers_with_the_decoded_weights(tmp_path, tied_model, encoding):
    import torch

    model, tensors = tied_model
    path = tmp_path / "model.gguf"
    kept = write_gguf(path, tensors, num_heads=6, num_kv_heads=2, head_dim=32, encoding=encoding)
    state = {name: torch.from_numpy(value.copy()) for name, value in kept.items()}
    model.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]})
    loaded = load_model(path, "float32")
    assert loaded.config.tied
    ours = full_logits(loaded.params, loaded.config, TOKENS)
    np.testing.assert_allclose(ours, transformers_logits(model, TOKENS), atol=1e-4)


@pytest.mark.parametrize("scaling", ["linear", "llama3"])
def test_gguf_rope_scaling_gives_the_logits_of_transformers(tmp_path, scaling):
    pytest.importorskip("transformers")
    model = transformers_llama(tmp_path, **HF_VARIANTS[scaling], attention_bias=True)
    tensors = {name: value.numpy() for name, value in model.state_dict().items()}
    rope = model.config.rope_parameters
    extra, divisors = {}, None
    if scaling == "linear":
        extra = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": rope["factor"]}
    else:  # the converter writes what plain frequencies are divided by
        plain = rope["rope_theta"] ** -(np.arange(0, 16, 2, dtype=np.float64) / 16)
        divisors = plain / model.model.rotary_emb.inv_freq.numpy()
        assert 1 == divisors.min() and divisors.max() > 7.99 and len(set(divisors.round(3))) > 3
    write_gguf(
        tmp_path / "model.gguf", tensors, num_heads=4, num_kv_heads=2, head_dim=16,
        rope_theta=rope["rope_theta"], rope_divisors=divisors, extra_fields=extra,
    )  # fmt: skip
    loaded = load_model(tmp_path / "model.gguf", "float32")
    assert loaded.config.qkv_bias and not loaded.config.tied
    ours = full_logits(loaded.params, loaded.config, TOKENS)
    np.testing.assert_allclose(ours, transformers_logits(model, TOKENS), atol=1e-4)


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    return load_model(random_gguf(tmp_path_factory.mktemp("random") / "random.gguf"), "float32")


def test_the_first_token_moves_the_last_logits(random_model):
    """Otherwise tests that lean on this model would not notice a lost context."""
    tokens = np.random.default_rng(0).integers(0, 500, 60).tolist()
    changed = [(tokens[0] + 1) % 500, *tokens[1:]]
    before, after = (full_logits(random_model.params, random_model.config, ids)[-1] for ids in (tokens, changed))
    assert np.abs(before - after).max() > 1e-2


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_chunks_and_decodes_of_two_sequences_equal_each_whole_sequence(random_model, implementation):
    """Sequence A: 9 tokens in steps of 5, 3, 1; B: 7 tokens in steps of 1, 4, 2. Shuffled blocks, padded steps."""
    config, params = random_model.config, random_model.params
    rng = np.random.default_rng(1)
    a, b = rng.integers(0, 500, 9).tolist(), rng.integers(0, 500, 7).tolist()
    pool_layout = layout("cpu", config.num_kv_heads, config.head_dim, 4, "float32")
    # Garbage in unwritten blocks must not matter; finite, for masked attention multiplies it by 0.
    pools = (jnp.full_like(pool_layout.allocate(config.num_layers, 8), 1e3),)
    tables = {"a": [5, 2, 7], "b": [3, 6, 0]}
    plan = AttentionPlan(implementation, (pool_layout,))
    step_of = jax.jit(llama.forward, static_argnums=(1, 4), donate_argnums=2)
    rows = {"a": [], "b": []}
    for step in ([("b", 0, 1), ("a", 0, 5)], [("a", 5, 8), ("b", 1, 5)], [("a", 8, 9), ("b", 5, 7)]):  # decodes first
        token_ids, positions, ends = [], [], [0]
        for name, start, stop in step:
            token_ids += {"a": a, "b": b}[name][start:stop]
            positions += range(start, stop)
            ends.append(len(token_ids))
        padding = [0] * (8 - len(token_ids))
        batch = RaggedBatch(
            jnp.array([tables[name] for name, _, _ in step] + [[0, 0, 0]], jnp.int32),
            jnp.array([stop for _, _, stop in step] + [0], jnp.int32),
            jnp.array([*ends, ends[-1]], jnp.int32),
            jnp.int32(sum(stop - start == 1 for _, start, stop in step)),
        )
        inputs = ForwardInputs(
            jnp.array(token_ids + padding, jnp.int32), jnp.array(positions + padding, jnp.int32), (batch,)
        )
        hidden, pools = step_of(params, config, pools, inputs, plan)
        step_logits = np.asarray(llama.logits(params, config, hidden))
        for (name, _, _), start, stop in zip(step, ends, ends[1:]):
            rows[name].append(step_logits[start:stop])
    for name, tokens in (("a", a), ("b", [*b, 0, 0])):  # one length, one compile; what follows b changes nothing in b
        got = np.concatenate(rows[name])
        np.testing.assert_allclose(got, full_logits(params, config, tokens)[: len(got)], atol=1e-4)


def test_the_pool_is_written_in_place(random_model):
    """Donated, aliased, and no copy of it among the temporaries."""
    config, params = random_model.config, random_model.params
    pool_layout = layout("cpu", config.num_kv_heads, config.head_dim, 32, "float32")
    pool = pool_layout.allocate(config.num_layers, 256)
    batch = RaggedBatch(
        jnp.ones((4, 2), jnp.int32), jnp.ones(4, jnp.int32), jnp.arange(5, dtype=jnp.int32), jnp.int32(4)
    )
    inputs = ForwardInputs(jnp.zeros(4, jnp.int32), jnp.zeros(4, jnp.int32), (batch,))
    step = jax.jit(llama.forward, static_argnums=(1, 4), donate_argnums=2)
    for decode_only in (False, True):
        plan = AttentionPlan("xla", (pool_layout,), decode_only)
        memory = step.lower(params, config, (pool,), inputs, plan).compile().memory_analysis()
        assert memory.alias_size_in_bytes >= pool.nbytes
        assert memory.temp_size_in_bytes < pool.nbytes / 4


def test_logits_are_float32_in_a_bfloat16_model(tmp_path):
    loaded = load_model(random_gguf(tmp_path / "random.gguf"), "bfloat16")
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(loaded.params))
    logits = full_logits(loaded.params, loaded.config, TOKENS[:8])
    assert logits.dtype == np.float32
    exact = load_model(random_gguf(tmp_path / "random.gguf"), "float32")
    reference = full_logits(exact.params, exact.config, TOKENS[:8])
    assert np.abs(logits - reference).max() < 0.05 * np.abs(reference).max()
