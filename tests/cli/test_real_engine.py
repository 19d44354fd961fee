"""The front ends over the real engine and a tiny random model: what they print is what the model says."""

import json
import re

import pytest

from jserve import LLM, SamplingParams
from jserve.cli import config_file
from jserve.cli import main as cli
from jserve.doctor import devices
from jserve.weights.load import load_model
from tests.support.tiny_models import naive_generate, random_gguf

pytestmark = pytest.mark.xdist_group("front ends over one engine")

PROMPTS = [
    "abc",
    "The capital of France is",
    "x",
    "12345 67890",
    "a longer prompt, longer than a step's budget of tokens",
]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(random_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf"))


@pytest.fixture(scope="module")
def config(tmp_path_factory, model):
    """Path of a TOML file for a small engine; its compile cache is filled by the first test."""
    folder = tmp_path_factory.mktemp("config")
    (folder / "tiny.toml").write_text(f"""
        [model]
        path = "{model}"
        [kv]
        memory_bytes = 8_388_608
        block_size = 16
        [scheduler]
        max_num_seqs = 4
        max_num_batched_tokens = 32
        [compile]
        cache_dir = "{folder / "cache"}"
        token_buckets = [32]
        sequence_buckets = [4]
        forbid_compile = true
    """)
    return str(folder / "tiny.toml")


@pytest.fixture(scope="module")
def llm(config):
    with LLM(config=config_file.load(config)) as llm:
        yield llm


@pytest.mark.parametrize("chosen", [None, "cpu"])
def test_a_start_beside_an_accelerator_that_jax_does_not_see_says_so(config, monkeypatch, capsys, chosen):
    monkeypatch.setattr(devices, "hardware", lambda: frozenset({"tpu"}))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)  # jax has started: it stays on the CPU
    if chosen:
        monkeypatch.setenv("JAX_PLATFORMS", chosen)
    assert cli.main(["generate", "--config", config, "--max-tokens", "1", "abc"]) == 0
    warned = "warning: a TPU is here, and jax does not use it; next: pip install 'jax[tpu]'" in capsys.readouterr().err
    assert warned == (chosen is None)


@pytest.fixture(scope="module")
def greedy(llm):
    """RequestOutputs of PROMPTS."""
    return llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True))


def test_the_offline_api_says_what_the_model_says(model, greedy):
    loaded = load_model(model, "float32")
    for output in greedy:
        expected = naive_generate(loaded.params, loaded.config, output.prompt_token_ids, NUM_TOKENS)
        assert output.outputs[0].token_ids == expected
        assert output.usage.prompt_tokens == len(output.prompt_token_ids)
        assert output.outputs[0].finish_reason == "length"


def test_token_ids_as_a_prompt_give_the_same(llm, greedy):
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    again = llm.generate([output.prompt_token_ids for output in greedy], params)
    assert [output.outputs[0].token_ids for output in again] == [output.outputs[0].token_ids for output in greedy]


def test_generate_prints_the_same_text(config, greedy, capsys):
    flags = ["--config", config, "--max-tokens", str(NUM_TOKENS), "--temperature", "0", "--ignore-eos"]
    assert cli.main(["generate", PROMPTS[1], *flags]) == 0
    output = capsys.readouterr()
    assert output.out == greedy[1].outputs[0].text + "\n"
    assert "memory: " in output.err and "compile plan: " in output.err
    planned = int(re.search(r"; (\d+) executables in all", output.err)[1])
    assert f"compile: {planned} in " in output.err


def test_batch_writes_the_same_tokens(config, greedy, tmp_path):
    params = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    lines = [json.dumps({"prompt": prompt, "sampling_params": params}) for prompt in PROMPTS * 5]
    lines[7] = '{"prompt": "x", "sampling_params": {"top_p": 7}}'
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    assert cli.main(["batch", "--config", config, *files]) == 0
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for number, (result, expected) in enumerate(zip(results, greedy * 5, strict=True)):
        if number == 7:
            assert result["error"]["field"] == "sampling_params.top_p"
        else:
            assert result["outputs"][0]["token_ids"] == expected.outputs[0].token_ids
            assert result["outputs"][0]["text"] == expected.outputs[0].text


def test_throughput_counts_what_was_asked_for(config, capsys):
    load = ["--num-prompts", "6", "--input-len", "20", "--output-len", "10", "--max-concurrency", "3", "--json"]
    assert cli.main(["bench", "throughput", "--config", config, *load]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["completed"], report["total_input_tokens"], report["total_output_tokens"]) == (6, 120, 60)
    assert report["compiles_after_ready"] == 0 and report["cached_token_share"] == 0
    assert 0 <= report["padded_token_share"] < 1 and report["output_throughput"] > 0
    assert report["scheduled_tokens"] == 6 * (20 + 10 - 1)


def test_startup_is_faster_with_a_warm_cache(config, capsys):
    assert cli.main(["bench", "startup", "--config", config, "--num-warm", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["warm_phases_s"]["compile"] < report["cold_phases_s"]["compile"]
    assert sum(report["cold_phases_s"].values()) == pytest.approx(report["cold_ready_s"])
    assert report["cold_first_token_s"] > report["cold_ready_s"] > report["warm_ready_s"]


def test_what_is_no_model_is_one_line(tmp_path, config, model, capsys):
    truncated = tmp_path / "truncated.gguf"
    truncated.write_bytes(open(model, "rb").read()[:5000])
    (tmp_path / "empty").mkdir()
    for path in (truncated, tmp_path / "empty", tmp_path / "nothing.gguf"):
        assert cli.main(["generate", "x", "-q", "--config", config, "--model", str(path)]) == 1
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1 and path.name in error, error
