"""Compile bundles: made without weights, served by another process without a compile, refused by naming what differs."""

import dataclasses
import json
import subprocess
import sys

import fsspec
import jax
import pytest

from jserve.config import ConfigError
from jserve.engine.build import build_engine
from jserve.engine.bundle import compile_bundle
from jserve.runner.bundle import NAME, open_bundle
from jserve.weights.remote import to_bucket
from tests.support.engines import config_for
from tests.support.smollm2 import smollm2_gguf
from tests.support.tiny_models import naive_generate, random_gguf

PROMPT = [72, 101, 300, 7, 44, 12]

SERVED = """
import json, sys
import jax
compiles = []
def listen(event, seconds, **_):
    if event == "/jax/core/compile/backend_compile_duration":
        compiles.append(seconds)
jax.monitoring.register_event_duration_secs_listener(listen)
from jserve import LLM, SamplingParams
from jserve.runner import compiler
def no_lowering(*arguments, **_):
    raise AssertionError("a program was lowered")
compiler.understands = no_lowering
from tests.support.engines import config_for
with LLM(config=config_for(sys.argv[1], compile={"bundle": sys.argv[2], "cache_dir": sys.argv[3]})) as llm:
    params = [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
              SamplingParams(seed=1, max_tokens=6, logprobs=2, presence_penalty=0.5)]
    outputs = llm.generate([json.loads(sys.argv[4])] * 2, params)
print(json.dumps({"ids": outputs[0].outputs[0].token_ids, "compiles": len(compiles)}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return random_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", num_heads=4, num_kv_heads=2)


@pytest.fixture(scope="module")
def bundle(model, tmp_path_factory):
    return compile_bundle(config_for(model), tmp_path_factory.mktemp("out") / "bundle")


def test_another_process_serves_from_it_and_compiles_nothing(model, bundle, tmp_path):
    from jserve.weights.load import load_model

    loaded = load_model(model, "float32")
    command = [sys.executable, "-c", SERVED, str(model), str(bundle.folder), str(tmp_path), json.dumps(PROMPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    served = json.loads(done.stdout.splitlines()[-1])
    assert served["ids"] == naive_generate(loaded.params, loaded.config, PROMPT, 6)
    assert served["compiles"] == 0
    assert not (tmp_path / "executables").exists()


def test_matrices_that_stay_packed_are_in_it_as_the_engine_loads_them(tmp_path):
    config = config_for(smollm2_gguf(), model={"context_length": 64})
    bundle = compile_bundle(config, tmp_path / "bundle")
    build_engine(config.replace("compile", bundle=str(bundle.folder))).stop()


def test_programs_for_another_number_of_threads_are_others(model, bundle):
    """Their scratch memory is for so many."""
    with pytest.raises(ConfigError, match="threads of a kernel"):
        bundle.check({**bundle.facts, "threads of a kernel": "99"})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"scheduler": {"max_num_seqs": 2}}, r"compile plan.sequence_buckets: expected '\(4,\)', found '\(2,\)'"),
        ({"model": {"context_length": 64}}, r"model.context_length: expected '256', found '64'"),
        ({"model": {"quantize": "int8"}}, r"parameter .*: expected 'float32.*', found"),
        ({"kv": {"num_blocks": 100}}, r"pool shapes: expected .*, found "),
    ],
)
def test_another_config_is_refused_by_naming_what_differs(model, bundle, changes, message):
    changes = {section: dict(values) for section, values in changes.items()}
    config = config_for(model, **changes).replace("compile", bundle=str(bundle.folder))
    with pytest.raises(ConfigError, match=message):
        build_engine(config)


@pytest.mark.parametrize("name, other", [("jax", "0.1.2"), ("device", "TPU v9"), ("XLA_FLAGS", "--x"), ("jserve", "0")])
def test_another_machine_or_version_is_refused_by_name(bundle, name, other):
    with pytest.raises(ConfigError) as refused:
        bundle.check({**bundle.facts, name: other})
    assert f"{name}: expected {bundle.facts[name]!r}, found {other!r}. Make it again" in str(refused.value)
    bundle.check(bundle.facts)


def test_damage_is_named(bundle, tmp_path):
    name, entry = next(iter(bundle.programs.items()))
    (tmp_path / NAME).write_bytes((bundle.folder / NAME).read_bytes())
    copy = open_bundle(tmp_path)
    with pytest.raises(ConfigError, match=f"{entry['file']}: No such file"):
        copy.load(name, jax.devices()[:1])
    (tmp_path / entry["file"]).write_bytes((bundle.folder / entry["file"]).read_bytes()[:-1])
    with pytest.raises(ConfigError, match=f"{entry['file']}: other bytes than were written"):
        copy.load(name, jax.devices()[:1])
    with pytest.raises(ConfigError, match=r"has no program of another plan; make it again"):
        copy.load("of another plan", jax.devices()[:1])
    (tmp_path / NAME).write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        open_bundle(tmp_path)


def test_what_is_in_the_way_or_missing_is_said(model, bundle, tmp_path):
    with pytest.raises(ConfigError, match="bundle: already there"):
        compile_bundle(config_for(model), bundle.folder)
    with pytest.raises(ConfigError, match="nowhere'?: no such folder; `jserve compile --out` makes one"):
        open_bundle(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="--target v1: one of v4, v5e"):
        compile_bundle(config_for(model), tmp_path / "bundle", "v1")
    with pytest.raises(ConfigError, match="--out /proc/no/bundle: .*; name a folder that can be written"):
        compile_bundle(config_for(model), "/proc/no/bundle")
    assert list(tmp_path.iterdir()) == []
    assert dataclasses.asdict(open_bundle(bundle.folder)) == dataclasses.asdict(bundle)


def test_a_bundle_may_lie_in_a_bucket(model, bundle, tmp_path, monkeypatch):
    memory, real = fsspec.filesystem("memory"), fsspec.core.url_to_fs
    memory.store.clear()
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url: real(url.replace("gs://", "memory://")))
    to_bucket(bundle.folder, "gs://bucket/bundle", NAME, "--out gs://bucket/bundle")
    with pytest.raises(ConfigError, match="--out gs://bucket/bundle: already there"):
        to_bucket(bundle.folder, "gs://bucket/bundle", NAME, "--out gs://bucket/bundle")
    paths = {"bundle": "gs://bucket/bundle", "cache_dir": str(tmp_path)}
    engine = build_engine(config_for(model, compile=paths))
    engine.stop()
    with pytest.raises(ConfigError, match="compile.bundle = 'gs://bucket/other': nothing is there"):
        build_engine(config_for(model, compile=paths | {"bundle": "gs://bucket/other"}))
