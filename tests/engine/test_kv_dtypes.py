"""Pools of every dtype through the real engine: chunks, sharing, copies and swapping leave the tokens as they are."""

from __future__ import annotations

import pytest

from jserve.config import Config, ConfigError
from jserve.engine.settings import resolve_automatic
from tests.support.arrivals import force_preemptions
from tests.support.engines import answers, request, running_engine
from tests.support.tiny_models import random_gguf

SHARED = [(5 * i) % 499 for i in range(40)]
NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "int8": "int8", "fp8": "fp8"}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return random_gguf(tmp_path_factory.mktemp("model") / "model.gguf")


def work():
    drawn = dict(temperature=1.0, seed=3, ignore_eos=True)
    made = [request(SHARED[: 7 * n] + [n], 14, logprobs=0, ignore_eos=True) for n in range(1, 6)]
    return made + [request(SHARED[:21], 10, n=3, **drawn), request(SHARED[:18], 8, beam_width=3, n=2, temperature=None)]


@pytest.mark.parametrize("dtype", ["f16", "int8", "fp8"])
def test_whatever_happens_to_blocks_their_values_and_scales_go_with_them(path, dtype):
    """What a key or value is stored as depends on itself alone, so each request gets what it gets alone."""
    with running_engine(path, kv={"dtype": dtype, "prefix_cache": False}) as engine:
        assert engine.info.kv_dtype == NAMES[dtype]
        alone = [answers(engine, [one])[0] for one in work()]
    small = {"dtype": dtype, "block_size": 4, "num_blocks": 40, "memory_bytes": None, "preemption": "swap"}
    with running_engine(path, kv=small) as engine:
        force_preemptions(engine)
        together = answers(engine, work())
        loads = engine.loads()
    assert loads.num_swap_preemptions > 3 and loads.swapped_in_bytes > 0
    for one, other in zip(together, alone):
        assert [o.token_ids for o in one.outputs] == [o.token_ids for o in other.outputs]
        for mine, theirs in zip(one.outputs[0].logprobs or [], other.outputs[0].logprobs or []):
            # A key or value that lies between two numbers may be rounded the other way.
            assert mine.chosen.logprob == pytest.approx(theirs.chosen.logprob, abs=0.02)


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


def test_dtypes_that_cannot_be_served_are_refused_by_name():
    with pytest.raises(ConfigError, match="kv.dtype = 'int4': one of f32, f16, bf16, int8, fp8"):
        resolve_automatic(Config().replace("kv", dtype="int4"), "cpu")
    for platform in ("gpu", "tpu"):
        with pytest.raises(ConfigError, match=f"kv.dtype = 'int8': needs scales.*on {platform} fp8"):
            resolve_automatic(Config().replace("kv", dtype="int8"), platform)
