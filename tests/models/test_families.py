"""Mistral, Qwen and Gemma against transformers, from checkpoints on disk: windows, norms, caps, rope by layer."""

import numpy as np
import pytest

from jserve.models.config import ModelError, from_hf
from jserve.models.run_layers import run_layers
from jserve.weights.load import load_model
from tests.support.tiny_models import full_logits, transformers_logits, transformers_model

TOKENS = np.random.default_rng(7).integers(0, 96, 100).tolist()
GEMMA_3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
# name of the architecture, settings, window of each layer
VARIANTS = {
    "mistral": ("Mistral", {"sliding_window": 12, "num_hidden_layers": 3}, [12, 12, 12]),
    "mistral, no window": ("Mistral", {"sliding_window": None}, [None, None]),
    "qwen2": ("Qwen2", {}, [None, None]),
    "qwen2, windows from layer 2": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2, "num_hidden_layers": 3},
        [None, None, 9],
    ),
    "qwen3": ("Qwen3", {"head_dim": 24}, [None, None]),
    "qwen3, biases": ("Qwen3", {"attention_bias": True}, [None, None]),
    "gemma2": (
        "Gemma2",
        {"sliding_window": 10, "num_hidden_layers": 4, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0,
         "final_logit_softcapping": 4.0},
        [10, None, 10, None],
    ),
    "gemma2, odd": ("Gemma2", {"sliding_window": 10, "num_hidden_layers": 3}, [10, None, 10]),
    "gemma3": (
        "Gemma3",
        {"sliding_window": 10, "num_hidden_layers": 7, "rope_parameters": GEMMA_3_ROPE, "query_pre_attn_scalar": 20},
        [10, 10, 10, 10, 10, None, 10],
    ),
    "gemma3, thirds": (
        "Gemma3",
        {"sliding_window": 10, "num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]
         + ["sliding_attention"] * 2 + ["full_attention"]},
        [10, 10, None, 10, 10, None],
    ),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(tmp_path, variant):
    pytest.importorskip("transformers")
    name, settings, windows = VARIANTS[variant]
    model = transformers_model(tmp_path, name, **settings)
    loaded = load_model(tmp_path, "float32")
    groups = [loaded.config.layer_groups[number] for number in loaded.config.group_of_layers]
    assert [group.sliding_window for group in groups] == windows
    ours, theirs = full_logits(loaded.params, loaded.config, TOKENS, "xla"), transformers_logits(model, TOKENS)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    if name.startswith("Gemma2"):
        assert np.abs(theirs).max() > 0.5 * settings.get("final_logit_softcapping", 1.0)  # the cap matters


def test_a_shorter_context_keeps_what_a_layer_is(tmp_path):
    pytest.importorskip("transformers")
    model = transformers_model(tmp_path, "Gemma3", sliding_window=10, num_hidden_layers=6)
    loaded = load_model(tmp_path, "float32", context_length=8)
    ours = full_logits(loaded.params, loaded.config, TOKENS[:8])
    np.testing.assert_allclose(ours, transformers_logits(model, TOKENS[:8]), atol=1e-4)


def test_layers_run_in_their_order_scanned_or_not():
    def note(carry, weights, group, place):
        total, places = carry
        return total * 3 + weights + 100 * group, places + place * 10.0**group

    for pattern in [(0, 0, 0, 0), (1, 0, 1, 0), (0, 0, 1, 0, 0, 1), (1, 1, 0, 1), (0,)]:
        weights = np.arange(len(pattern), dtype=np.float32)
        scanned = run_layers(note, (np.float32(0), np.float32(0)), weights, pattern, "tpu")
        unrolled = run_layers(note, (np.float32(0), np.float32(0)), weights, pattern, "gpu")
        assert [float(x) for x in scanned] == [float(x) for x in unrolled]


GEMMA = {
    "architectures": ["Gemma2ForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 96,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_activation": "relu"}, "hidden_activation = 'relu': not built"),
        ({"layer_types": ["full_attention"]}, "layer_types = .*expected 2 of"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types = "),
        ({"sliding_window": 0}, "sliding_window = 0"),
        ({"architectures": ["Gemma3ForCausalLM"], "final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"architectures": ["Gemma4ForCausalLM"]}, "architectures = "),
    ],
)
def test_what_is_not_built_is_refused_by_name(change, message):
    with pytest.raises(ModelError, match=message):
        from_hf({**GEMMA, **change})


def test_defaults_of_transformers_fill_what_a_config_leaves_out():
    config = from_hf(GEMMA)
    assert (config.tied, config.head_dim, config.num_kv_heads, config.context_length) == (True, 256, 4, 8192)
    assert (config.attention_soft_cap, config.logit_soft_cap, config.sliding_window) == (50.0, 30.0, 4096)
    assert config.query_scale == 256**-0.5 and config.windowed_layers == (True, False)
    old = from_hf(
        {**GEMMA, "architectures": ["Gemma3ForCausalLM"], "rope_theta": 5e5, "rope_local_base_freq": 1e3,
         "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    )  # fmt: skip
    assert (old.rope.theta, old.rope.kind, old.rope.factor, old.local_rope.theta) == (5e5, "linear", 8.0, 1e3)
