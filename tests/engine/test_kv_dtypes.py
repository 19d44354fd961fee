"""Names of dtypes, which are refused, and what a bfloat16 model scores; what happens to their blocks: test_tiers_dtypes."""

from __future__ import annotations

import pytest

from jserve.config import Config, ConfigError
from jserve.engine.settings import resolve_automatic
from pallas_kernels.cpu.ops import why_no_simd
from tests.support.engines import answers, request, running_engine
from tests.support.tiny_models import random_gguf

NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "int8": "int8", "fp8": "fp8"}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return random_gguf(tmp_path_factory.mktemp("model") / "model.gguf")


@pytest.mark.parametrize("given", [*NAMES, "float32", "bfloat16"])
def test_names_of_dtypes(given):
    config = resolve_automatic(Config().replace("kv", dtype=given), "cpu")
    assert config.kv.dtype == NAMES.get(given, given)


@pytest.mark.parametrize(
    ("platform", "dtype", "num_seqs", "buckets"),
    [("cpu", "bfloat16", 64, (8, 16, 32, 64)), ("cpu", "bfloat16", 1, (1,)), ("cpu", "float32", 64, None), ("tpu", "bfloat16", 64, None)],
)
def test_a_bfloat16_model_on_cpu_has_no_step_of_a_single_row(platform, dtype, num_seqs, buckets):
    config = Config().replace("model", dtype=dtype).replace("scheduler", max_num_seqs=num_seqs)
    assert resolve_automatic(config, platform).compile.sequence_buckets == buckets


def test_a_bfloat16_model_scores_like_a_float32_one_alone_and_among_others(path):
    requests = [request([(7 * i + k) % 499 for i in range(20 + k)], 1, logprobs=0) for k in range(12)]
    best = lambda updates: [one.outputs[0].logprobs[0].chosen.logprob for one in updates]
    with running_engine(path) as engine:
        wanted = best(answers(engine, requests))
    with running_engine(path, model={"dtype": "bfloat16"}) as engine:
        assert engine.info.dtype == "bfloat16"
        together = best(answers(engine, requests))
        alone = [best(answers(engine, [one]))[0] for one in requests]
    assert together == pytest.approx(wanted, abs=0.05) and alone == pytest.approx(wanted, abs=0.05)
    assert together != wanted


@pytest.mark.skipif(why_no_simd() is not None, reason=f"{why_no_simd()}")
@pytest.mark.parametrize("platform, changes, dtype", [
    ("cpu", {"model": {"quantize": "int8"}}, "bfloat16"),
    ("cpu", {"model": {"quantize": "int8"}, "kernel": {"attention": "xla"}}, "float32"),
    ("cpu", {"model": {"quantize": "int8"}, "compile": {"deterministic": True}}, "float32"),
    ("cpu", {"model": {"quantize": "int8"}, "kv": {"dtype": "f16"}}, "float16"),
    ("cpu", {}, "float32"),
    ("gpu", {"model": {"quantize": "int8"}}, "bfloat16"),
])  # fmt: skip
def test_the_kv_dtype_unless_one_is_given(platform, changes, dtype):
    config = Config()
    for section, fields in changes.items():
        config = config.replace(section, **fields)
    assert resolve_automatic(config, platform).kv.dtype == dtype


def test_dtypes_that_cannot_be_served_are_refused_by_name():
    with pytest.raises(ConfigError, match="kv.dtype = 'int4': one of f32, f16, bf16, int8, fp8"):
        resolve_automatic(Config().replace("kv", dtype="int4"), "cpu")
    for platform in ("gpu", "tpu"):
        with pytest.raises(ConfigError, match=f"kv.dtype = 'int8': needs scales.*on {platform} fp8"):
            resolve_automatic(Config().replace("kv", dtype="int8"), platform)
