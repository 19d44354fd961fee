"""From files to parameters: each filled exactly once, within the memory it takes; what does not fit is named."""

import json
import math
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jserve.models.config import ModelError
from jserve.parallel.placement import Placement
from jserve.weights import load
from jserve.weights.checkpoint import HEAD, open_checkpoint
from jserve.weights.errors import WeightsError
from jserve.weights.load import aligned_empty, load_model
from tests.support.smollm2 import smollm2_gguf
from tests.support.tiny_models import random_gguf

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 40,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


def tensors(tied=False):
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (40, 32), "model.norm.weight": (32,), HEAD: (40, 32)}
    for layer in range(2):
        rows = {"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32),
                "self_attn.o_proj": (32, 32), "mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32),
                "mlp.down_proj": (32, 48), "input_layernorm": (32,), "post_attention_layernorm": (32,)}  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in rows.items()}
    values = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    if tied:
        del values[HEAD]
    return values


def write_folder(folder, values, generation=None, **settings):
    (folder / "config.json").write_text(json.dumps({**CONFIG, **settings}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    save_file(values, folder / "model.safetensors")
    return folder


def test_weights_go_where_the_model_takes_them(tmp_path):
    values = tensors()
    params = load_model(write_folder(tmp_path, values), "float32").params
    assert np.array_equal(params.embedding, values["model.embed_tokens.weight"])
    assert np.array_equal(params.head, values[HEAD])
    layer = "model.layers.1.self_attn."
    qkv = np.asarray(params.layers.qkv[1]).reshape(2, 4, 8, 32)  # [K, G + 2, H, D]
    assert np.array_equal(qkv[1, 0], values[layer + "q_proj.weight"][16:24])
    assert np.array_equal(qkv[1, 2], values[layer + "k_proj.weight"][8:16])
    assert np.array_equal(qkv[0, 3], values[layer + "v_proj.weight"][:8])
    assert np.array_equal(params.layers.gate_up[0][48:], values["model.layers.0.mlp.up_proj.weight"])


def test_tied_without_head_loads(tmp_path):
    loaded = load_model(write_folder(tmp_path, tensors(tied=True), tie_word_embeddings=True), "float32")
    assert loaded.config.tied and loaded.params.head is None


def test_tied_with_a_head_that_is_the_embedding_keeps_one_copy(tmp_path, caplog):
    values = tensors()
    values[HEAD] = values["model.embed_tokens.weight"].copy()
    loaded = load_model(write_folder(tmp_path, values, tie_word_embeddings=True), "float32")
    assert loaded.params.head is None and not caplog.text


def test_tied_with_a_head_of_its_own_uses_the_head_aloud(tmp_path, caplog):
    values = tensors()
    loaded = load_model(write_folder(tmp_path, values, tie_word_embeddings=True), "float32")
    assert np.array_equal(loaded.params.head, values[HEAD]) and not loaded.config.tied
    assert "lm_head.weight differs from the embedding" in caplog.text


def test_untied_without_head_is_refused_by_name(tmp_path):
    with pytest.raises(WeightsError, match="missing lm_head.weight, and the config does not say that it is tied"):
        load_model(write_folder(tmp_path, tensors(tied=True)), "float32")


def test_missing_tensors_are_named(tmp_path):
    values = tensors()
    del values["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(WeightsError, match=r"missing model.layers.1.mlp.up_proj.weight$"):
        load_model(write_folder(tmp_path, values), "float32")


def test_a_tensor_that_no_parameter_takes_is_refused(tmp_path):
    """A bias that the config does not mention would otherwise silently be left out of the model."""
    values = tensors() | {"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}
    with pytest.raises(WeightsError, match="no parameter takes model.layers.0.self_attn.q_proj.bias"):
        load_model(write_folder(tmp_path, values), "float32")


def test_rope_frequencies_of_old_checkpoints_are_no_parameters(tmp_path):
    values = tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    load_model(write_folder(tmp_path, values), "float32")


def test_a_tensor_of_another_shape_than_the_config_says_is_named(tmp_path):
    with pytest.raises(WeightsError, match=r"embed_tokens.weight is \[40, 32\], the config makes it \[41, 32\]"):
        load_model(write_folder(tmp_path, tensors(), vocab_size=41), "float32")


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_every_stored_float_becomes_the_wanted_one(tmp_path, stored, wanted):
    import ml_dtypes  # noqa: F401  registers bfloat16 with numpy

    values = {name: value.astype(stored) for name, value in tensors().items()}
    params = load_model(write_folder(tmp_path, values), wanted).params
    assert params.embedding.dtype == wanted
    expected = values["model.embed_tokens.weight"].astype("float32").astype(wanted)
    assert np.array_equal(np.asarray(params.embedding), expected)


def test_a_path_that_holds_no_model_is_named(tmp_path):
    with pytest.raises(WeightsError, match="nowhere: no such file or folder"):
        load_model(tmp_path / "nowhere", "float32")
    with pytest.raises(WeightsError, match="config.json: missing"):
        load_model(tmp_path, "float32")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(WeightsError, match="config.json: not JSON"):
        load_model(tmp_path, "float32")


def test_what_is_not_built_is_refused_with_the_file(tmp_path):
    folder = write_folder(tmp_path, tensors(), architectures=["MambaForCausalLM"])
    with pytest.raises(WeightsError, match=r"config.json: architectures = \['MambaForCausalLM'\]: not built"):
        load_model(folder, "float32")
    folder = write_folder(tmp_path, tensors(), architectures=["MistralForCausalLM"], sliding_window=0)
    with pytest.raises(ModelError, match="sliding_window = 0"):
        load_model(folder, "float32")


def test_generation_config_gives_defaults_and_all_eos_ids(tmp_path):
    generation = {"temperature": 0.6, "top_p": 0.9, "top_k": None, "do_sample": True, "max_new_tokens": 7}
    generation["eos_token_id"] = [5, 6]
    loaded = load_model(write_folder(tmp_path, tensors(), generation), "float32")
    assert loaded.generation_defaults == {"temperature": 0.6, "top_p": 0.9, "max_tokens": 7}
    assert loaded.eos_token_ids == (5, 6)


def test_without_generation_config_the_eos_of_the_config_counts(tmp_path):
    loaded = load_model(write_folder(tmp_path, tensors()), "float32")
    assert (loaded.generation_defaults, loaded.eos_token_ids) == ({}, (2,))
    assert loaded.tokenizer_source == tmp_path


def test_digest_follows_content_not_place(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir(), two.mkdir()
    digest = open_checkpoint(write_folder(one, tensors())).digest
    assert open_checkpoint(write_folder(two, tensors())).digest == digest
    values = load_file(two / "model.safetensors")
    values["model.layers.1.mlp.down_proj.weight"][-1, -1] += 1
    assert open_checkpoint(write_folder(two, values)).digest != digest
    assert open_checkpoint(write_folder(two, tensors(), rope_theta=5e5)).digest != digest


def test_progress_ends_at_all_bytes(tmp_path):
    seen = []
    path = random_gguf(tmp_path / "m.gguf")
    loaded = load_model(path, "float32", progress=lambda done, total: seen.append((done, total)))
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params))
    assert seen == sorted(seen) and seen[-1] == (num_bytes, num_bytes)


def test_a_loaded_model_survives_its_file(tmp_path):
    path = random_gguf(tmp_path / "m.gguf")
    params = load_model(path, "float32").params
    before = np.array(params.layers.qkv)
    path.write_bytes(b"\0" * path.stat().st_size)
    assert np.array_equal(params.layers.qkv, before)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_where_devices_have_memory_of_their_own_the_host_holds_one_layer_at_a_time(tmp_path, monkeypatch, quantize):
    path = random_gguf(tmp_path / "m.gguf", num_layers=3)
    whole = load_model(path, "float32", quantize=quantize).params
    held = []

    def counted(shape, dtype):
        held.append(math.prod(shape) * np.dtype(dtype).itemsize)
        return aligned_empty(shape, dtype)

    monkeypatch.setattr(load, "aligned_empty", counted)
    monkeypatch.setattr(Placement, "copies", True)
    by_layer = load_model(path, "float32", quantize=quantize).params
    assert all(map(np.array_equal, jax.tree.leaves(whole), jax.tree.leaves(by_layer)))
    stacked = [leaf.nbytes // 3 for leaf in jax.tree.leaves(by_layer.layers)]
    others = [leaf.nbytes for leaf in jax.tree.leaves(by_layer.replace(layers=None))]
    assert max(held) <= max(*stacked, *others) and set(held) <= {*stacked, *others}


MEASURE = """
import resource, sys, jax
from jserve.weights.load import aligned_empty, load_model
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
jax.block_until_ready(jax.numpy.zeros(1))
before = peak()
params = load_model(sys.argv[1], sys.argv[2]).params
jax.block_until_ready(params)
print(sum(leaf.nbytes for leaf in jax.tree.leaves(params)), peak() - before)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_peaks_at_the_size_of_the_weights(dtype, repository_root):
    """At most 1.3x of the loaded weights, the jax arrays included; about 1.0x is measured."""
    command = [sys.executable, "-c", MEASURE, str(smollm2_gguf()), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=repository_root)
    weights, peak = map(int, done.stdout.split())
    assert weights > 134e6 * np.dtype(jax.numpy.dtype(dtype)).itemsize
    assert peak <= 1.3 * weights
