"""What a config says, read from both formats; what is not built is refused by name."""

import pytest

from jserve.models.config import ModelError, RopeScaling, from_gguf, from_hf
from jserve.models.registry import model_code

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "vocab_size": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": [7, 8],
    "bos_token_id": 1,
}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": None}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 1024,
    "llama.embedding_length": 96,
    "llama.feed_forward_length": 256,
    "llama.attention.head_count": 6,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.eos_token_id": 7,
    "tokenizer.ggml.eot_token_id": 8,
    "tokenizer.ggml.bos_token_id": 1,
}
GGUF_SHAPES = {"token_embd.weight": (512, 96), "output.weight": (512, 96), "blk.0.attn_q.weight": (96, 96)}


def test_both_formats_describe_the_same_model():
    hf, gguf = from_hf(LLAMA), from_gguf(GGUF, GGUF_SHAPES)
    assert (hf.num_layers, hf.d_model, hf.d_ff, hf.vocab_size, hf.context_length) == (2, 96, 256, 512, 1024)
    assert (hf.num_heads, hf.num_kv_heads, hf.head_dim, hf.q_per_kv) == (6, 2, 16, 3)
    assert (hf.bos_token_id, hf.eos_token_ids, hf.tied) == (1, (7, 8), False)
    differing = {name for name in vars(hf) if getattr(hf, name) != getattr(gguf, name)}
    assert differing == {"architecture"}


def test_missing_kv_heads_means_one_per_head_and_explicit_head_dim_wins():
    config = from_hf({**LLAMA, "num_key_value_heads": None, "head_dim": 32})
    assert (config.num_kv_heads, config.head_dim) == (6, 32)


@pytest.mark.parametrize(
    "settings, rope",
    [
        ({}, RopeScaling(10000.0)),
        ({"rope_theta": 5e5}, RopeScaling(5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RopeScaling(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3_SCALING}, RopeScaling(5e5, "llama3", 8.0, 1.0, 4.0, 8192)),
        ({"rope_parameters": {**LLAMA3_SCALING, "rope_theta": 5e5}}, RopeScaling(5e5, "llama3", 8.0, 1.0, 4.0, 8192)),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, RopeScaling(10000.0, "linear", 4.0)),
    ],
)
def test_rope_is_read_in_old_and_new_spelling(settings, rope):
    assert from_hf({**LLAMA, **settings}).rope == rope


def test_linear_scaling_stretches_the_context_that_hf_states_before_scaling():
    assert from_hf({**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}}).context_length == 4096


def test_gguf_reads_linear_scaling_and_llama3_divisors():
    scaled = {**GGUF, "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    assert from_gguf(scaled, GGUF_SHAPES).rope == RopeScaling(10000.0, "linear", 2.0)
    divisors = (1.0,) * 7 + (8.0,)
    assert from_gguf({**GGUF, "llama.rope.freq_base": 5e5}, GGUF_SHAPES, divisors).rope == RopeScaling(
        5e5, "divisors", divisors=divisors
    )


def test_a_gguf_without_head_is_tied():
    assert from_gguf(GGUF, {"token_embd.weight": (512, 96)}).tied


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": None}, "architectures = None"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_key_value_heads": 4}, "6 heads cannot share 4 kv heads"),
        ({"head_dim": 15}, "head_dim = 15"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_attention_heads": "6"}, "num_attention_heads = '6'"),
        ({"rms_norm_eps": None}, "rms_norm_eps = None"),
        ({"rope_scaling": "linear"}, "rope_scaling = 'linear'"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id = "),
    ],
)
def test_hf_refusals_name_the_setting(settings, named):
    with pytest.raises(ModelError, match=named):
        from_hf({**LLAMA, **settings})


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"general.architecture": "gemma3"}, "'gemma3'"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn'"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count = 8"),
        ({"llama.attention.value_length": 32}, "llama.attention.value_length = 32"),
        ({"llama.attention.head_count_kv": [2, 1]}, "differ by layer"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": [2]}, r"llama.block_count = \[2\]"),
    ],
)
def test_gguf_refusals_name_the_key(fields, named):
    with pytest.raises(ModelError, match=named):
        from_gguf({**GGUF, **fields}, GGUF_SHAPES)


def test_a_window_that_covers_the_context_is_none():
    config = from_hf({**MISTRAL, "sliding_window": 256})
    assert [group.sliding_window for group in config.layer_groups] == [256]
    assert config.with_context_length(256).layer_groups[0].sliding_window is None
    assert config.with_context_length(257).layer_groups[0].sliding_window == 256


def test_mistral_without_the_key_has_hf_default_window():
    settings = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    assert from_hf({**settings, "max_position_embeddings": 32768}).sliding_window == 4096


@pytest.mark.parametrize("length", [0, -1, 1025])
def test_a_context_that_the_model_was_not_made_for_is_refused(length):
    with pytest.raises(ModelError, match=f"context_length = {length}: this model was made for 1 to 1024"):
        from_hf(LLAMA).with_context_length(length)
