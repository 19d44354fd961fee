"""Conversions: the same model in every format, whole or not at all, and damage that is found and named."""

import dataclasses
import errno
import json
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from jserve import LLM, SamplingParams
from jserve.cli import config_file
from jserve.tokenizer import from_folder, from_gguf
from jserve.weights import manifest
from jserve.weights.checkpoint import open_checkpoint
from jserve.weights.convert import convert
from jserve.weights.errors import WeightsError
from jserve.weights.hf_files import describing_files, hf_config
from jserve.weights.load import load_model
from tests.support.tiny_models import (
    full_logits,
    naive_generate,
    random_gguf,
    script_gguf,
    transformers_llama,
    transformers_logits,
)

PROMPT = [72, 101, 300, 7, 44, 12]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    # transformers wants the width to be a multiple of the heads.
    return random_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", num_heads=4, num_kv_heads=2)


@pytest.fixture(scope="module")
def hf(source, tmp_path_factory):
    return convert(source, tmp_path_factory.mktemp("hf") / "model", "hf", shard_bytes=400_000).path


@pytest.fixture(scope="module")
def orbax(hf, tmp_path_factory):
    return convert(hf, tmp_path_factory.mktemp("orbax") / "model", "orbax").path


def same_params(one, two):
    ours, theirs = jax.tree.leaves(one), jax.tree.leaves(two)
    return len(ours) == len(theirs) and all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(ours, theirs))


def test_gguf_to_hf_to_orbax_generates_the_same_tokens(source, hf, orbax):
    models = [load_model(path, "float32") for path in (source, hf, orbax)]
    outputs = [naive_generate(model.params, model.config, PROMPT, 8) for model in models]
    assert outputs[0] == outputs[1] == outputs[2] and len(set(outputs[0])) > 1
    for model in models[1:]:
        assert same_params(model.params, models[0].params)
        assert dataclasses.replace(model.config, architecture="llama") == models[0].config
        assert model.eos_token_ids == models[0].eos_token_ids


def test_orbax_becomes_the_hf_folder_again(hf, orbax, source, tmp_path):
    """The square closed: what came from the GGUF by way of HF and Orbax is the first HF folder, tensor by tensor."""
    again = convert(orbax, tmp_path / "hf", "hf", shard_bytes=400_000).path
    first, last = (open_checkpoint(path).tensors for path in (hf, again))
    assert first.keys() == last.keys()
    for name, tensor in first.items():
        assert (tensor.shape, tensor.encoding) == (last[name].shape, last[name].encoding)
        assert np.array_equal(tensor.read(0, tensor.num_rows), last[name].read(0, tensor.num_rows)), name
    described = [json.loads((path / "config.json").read_text()) for path in (hf, again)]
    assert described[0] == described[1]
    assert from_folder(again).encode("the tea", add_special=True) == from_folder(hf).encode("the tea", add_special=True)
    halves = convert(orbax, tmp_path / "halves", "orbax", dtype="bfloat16")
    assert same_params(load_model(halves.path, "bfloat16").params, load_model(source, "bfloat16").params)


def test_the_engine_serves_an_orbax_folder_and_verifies_it_where_asked(source, orbax, tmp_path):
    config = config_file.from_tables({
        "model": {"path": str(orbax), "verify": True},
        "kv": {"memory_bytes": 2_097_152, "block_size": 16, "host_memory_bytes": 0},
        "scheduler": {"max_num_seqs": 2, "max_num_batched_tokens": 16},
        "compile": {"cache_dir": str(tmp_path), "token_buckets": [16], "sequence_buckets": [2]},
    })
    loaded = load_model(source, "float32")
    with LLM(config=config) as llm:
        [found] = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert found.outputs[0].token_ids == naive_generate(loaded.params, loaded.config, PROMPT, 6)
    copy = shutil.copytree(orbax, tmp_path / "damaged")
    chunk = bytearray((copy / "params" / "embedding" / "0.0").read_bytes())
    chunk[1000] ^= 64
    (copy / "params" / "embedding" / "0.0").write_bytes(chunk)
    with pytest.raises(WeightsError, match="other bytes than were written: params/embedding/0.0"):
        LLM(config=config.replace("model", path=str(copy)))


def test_tokenizer_and_chat_template_come_along(source, hf, orbax):
    ours = from_gguf(open_checkpoint(source).tokenizer_source)
    chat = [{"role": "user", "content": "hi <|im_end|>  there"}]
    for folder in (hf, orbax):
        theirs = from_folder(folder)
        for text in ("a b  c\n12 <|x|>", "the  tea"):
            assert theirs.encode(text, add_special=True) == ours.encode(text, add_special=True)
        assert theirs.encode_chat(chat) == ours.encode_chat(chat)


def test_shards_are_cut_and_found_by_the_index(hf):
    index = json.loads((hf / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) > 1 and all((hf / shard).is_file() for shard in shards)
    assert manifest.verify(hf).format == "hf"


def test_transformers_reads_the_folder_and_computes_the_same(source, hf):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    model = load_model(source, "float32")
    theirs = transformers_logits(transformers.AutoModelForCausalLM.from_pretrained(hf, dtype="auto").eval(), PROMPT)
    assert np.abs(theirs - full_logits(model.params, model.config, PROMPT)).max() < 1e-3
    tokenizer = transformers.AutoTokenizer.from_pretrained(hf)
    ours = from_gguf(model.tokenizer_source)
    assert tokenizer.encode("the tea  is\n12") == ours.encode("the tea  is\n12", add_special=True)
    chat = [{"role": "user", "content": "hello"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert tokenizer.encode(text, add_special_tokens=False) == ours.encode_chat(chat)


def test_a_bos_that_the_gguf_adds_is_added_by_the_folder_too(source, tmp_path):
    transformers = pytest.importorskip("transformers")
    fields = {**open_checkpoint(source).tokenizer_source, "tokenizer.ggml.add_bos_token": True}
    checkpoint = dataclasses.replace(open_checkpoint(source), tokenizer_source=fields)
    for name, content in describing_files(checkpoint, "float32").items():
        (tmp_path / name).write_bytes(content)
    expected = from_gguf(fields).encode("the tea", add_special=True)
    assert expected[0] == fields["tokenizer.ggml.bos_token_id"]
    assert from_folder(tmp_path).encode("the tea", add_special=True) == expected
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).encode("the tea") == expected


def test_what_transformers_saved_becomes_orbax(tmp_path):
    pytest.importorskip("torch")
    transformers_llama(tmp_path / "hf", attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    converted = convert(tmp_path / "hf", tmp_path / "orbax", "orbax", dtype="bfloat16")
    assert converted.manifest.dtype == "bfloat16"
    expected = load_model(tmp_path / "hf", "bfloat16")
    assert same_params(load_model(converted.path, "bfloat16").params, expected.params)


@pytest.mark.parametrize("dtype, quantize", [("bfloat16", None), ("float32", "int8")])
def test_orbax_restores_in_the_dtype_asked_for(source, orbax, dtype, quantize):
    expected = load_model(source, dtype, quantize=quantize)
    assert same_params(load_model(orbax, dtype, quantize=quantize).params, expected.params)


def test_matrices_of_zeros_are_written_too(source, tmp_path):
    path = script_gguf(tmp_path / "script.gguf", [5, 6, 7], source)
    done = convert(path, tmp_path / "orbax", "orbax")
    assert same_params(load_model(done.path, "float32").params, load_model(path, "float32").params)


def test_any_program_of_orbax_restores_the_tree(orbax, source):
    import orbax.checkpoint as ocp

    tree = ocp.PyTreeCheckpointer().restore((orbax / "params").absolute())
    assert np.array_equal(tree["layers"]["qkv"], load_model(source, "float32").params.layers.qkv)


def test_llama3_frequencies_become_settings_again(tmp_path, source):
    theta, head_dim = 500000.0, 64
    turns = 8192 / (2 * np.pi) * theta ** -(np.arange(0, head_dim, 2) / head_dim)
    share = np.clip((turns - 1) / 3, 0, 1)
    checkpoint = open_checkpoint(source)

    def with_divisors(divisors):
        rope = dataclasses.replace(checkpoint.config.rope, theta=theta, kind="divisors", divisors=tuple(divisors))
        return dataclasses.replace(checkpoint, config=dataclasses.replace(checkpoint.config, rope=rope))

    written = hf_config(with_divisors(1 / ((1 - share) / 32 + share)), "float32")
    assert written["rope_scaling"]["rope_type"] == "llama3" and abs(written["rope_scaling"]["factor"] - 32) < 1e-3
    with pytest.raises(WeightsError, match="rope_freqs.weight does not follow from llama3's rule"):
        hf_config(with_divisors(np.linspace(1, 3, head_dim // 2)), "float32")


@pytest.mark.parametrize("format", ["hf", "orbax"])
def test_a_flipped_byte_is_found_and_named(source, tmp_path, format):
    folder = convert(source, tmp_path / "model", format).path
    for name in manifest.read(folder).files:
        content = (folder / name).read_bytes()
        if content:
            at = len(content) // 2
            (folder / name).write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
            with pytest.raises(WeightsError, match=f"other bytes than were written: {name};"):
                manifest.verify(folder)
            (folder / name).write_bytes(content)
    manifest.verify(folder)
    damaged = (folder / manifest.NAME).read_text().replace('"num_bytes": ', '"num_bytes": 1', 1)
    (folder / manifest.NAME).write_text(damaged)
    with pytest.raises(WeightsError, match="manifest is damaged"):
        load_model(folder, "float32")


def test_a_source_that_was_damaged_is_not_converted(hf, tmp_path):
    copy = shutil.copytree(hf, tmp_path / "hf")
    name = next(name for name in manifest.read(copy).files if name.startswith("model-00002-of"))
    content = bytearray((copy / name).read_bytes())
    content[-100] ^= 1
    (copy / name).write_bytes(content)
    with pytest.raises(WeightsError, match=name):
        convert(copy, tmp_path / "orbax", "orbax")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_missing_or_shortened_file_is_refused_at_load(orbax, tmp_path):
    copy = shutil.copytree(orbax, tmp_path / "orbax")
    chunk = copy / "params" / "layers.qkv" / "1.0.0"
    content = chunk.read_bytes()
    chunk.write_bytes(content[:-1])
    with pytest.raises(WeightsError, match=rf"layers.qkv/1.0.0: {len(content) - 1} bytes, {len(content)} were written"):
        load_model(copy, "float32")
    chunk.unlink()
    with pytest.raises(WeightsError, match="layers.qkv/1.0.0: missing"):
        load_model(copy, "float32")


KILLED = """
import sys, time
from pathlib import Path
from jserve.weights import convert as module
def report(phase, done, total):
    if phase == sys.argv[4] and done >= total / 2:
        print("half", flush=True)
        time.sleep(60)
module.convert(sys.argv[1], sys.argv[2], sys.argv[3], report=report)
"""


@pytest.mark.parametrize("format, phase", [("hf", "write weights"), ("orbax", "write weights"), ("orbax", "digest")])
def test_a_killed_conversion_leaves_nothing_that_loads_and_the_next_starts_clean(source, tmp_path, format, phase):
    target = tmp_path / "model"
    command = [sys.executable, "-c", KILLED, str(source), str(target), format, phase]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "half\n"
        with pytest.raises(WeightsError, match="another conversion is writing it"):
            convert(source, target, format)
        process.send_signal(signal.SIGKILL)
    left = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert [path.name for path in left] == [".model.converting"]
    with pytest.raises(WeightsError, match="config.json: missing"):
        load_model(left[0], "float32")
    done = convert(source, target, format)
    manifest.verify(done.path)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert same_params(load_model(target, "float32").params, load_model(source, "float32").params)


def test_an_interrupted_conversion_takes_its_scratch_folder_along(source, tmp_path):
    def interrupt(phase, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "model", "hf", report=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_what_is_in_the_way_or_not_built_is_said(source, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for target, message in ((tmp_path, "already there"), (tmp_path / "file", "already there")):
        with pytest.raises(WeightsError, match=message):
            convert(source, target, "hf")
    assert convert(source, tmp_path / "empty", "hf").path.is_dir()
    with pytest.raises(WeightsError, match="--dtype float16: not for --to orbax"):
        convert(source, tmp_path / "again", "orbax", dtype="float16")
    with pytest.raises(WeightsError, match="--to gguf: not built"):
        convert(source, tmp_path / "again", "gguf")


def test_a_full_disk_is_seen_before_anything_is_written(source, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 10_000})
    monkeypatch.setattr("jserve.weights.convert.shutil.disk_usage", lambda path: usage)
    for format in ("hf", "orbax"):
        with pytest.raises(WeightsError, match="GB are needed, 0.0 GB are free"):
            convert(source, tmp_path / "model", format)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", ["hf", "orbax"])
def test_a_disk_that_fills_up_on_the_way_leaves_nothing(source, tmp_path, monkeypatch, format):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)  # when what was written has to reach the disk
    with pytest.raises(OSError, match="No space left on device"):
        convert(source, tmp_path / "model", format)
    assert list(tmp_path.iterdir()) == []
