"""Host memory, disk, swapping, forks and copies with pools of every dtype: values and their scales stay together."""

from __future__ import annotations

import os
import random
import shutil

import pytest

from jserve.engine.settings import KV_DTYPES
from tests.engine.test_parallel_sampling import engine_of
from tests.support.arrivals import force_preemptions
from tests.support.engines import answers, request, token_ids
from tests.support.tiny_models import random_gguf

DTYPES = ["int8", "fp8", "f16", "bf16"]
SHARED = [(7 * i) % 500 for i in range(64)]  # eight blocks of 8
WITHOUT = {"prefix_cache": False, "host_tier": False, "host_memory_bytes": 0, "preemption": "recompute"}
BELOW = {"preemption": "swap", "poison_freed": True}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return random_gguf(tmp_path_factory.mktemp("model") / "model.gguf")


def work() -> list:
    """Prefixes of one family that end within a block and at its border, samples and beams on them."""
    drawn = dict(temperature=1.0, seed=3, ignore_eos=True)
    made = [request(SHARED[: 16 * n + n] + [n], 7, logprobs=0, ignore_eos=True) for n in range(4)]
    made.append(request(SHARED + [9], 6, logprobs=0, ignore_eos=True))
    return made + [request(SHARED[:45], 6, n=3, **drawn), request(SHARED[:42], 6, beam_width=3, n=2, temperature=None)]


def churn(engine, seed: int) -> None:
    """Fills the pool of 23 blocks with something else."""
    rng = random.Random(seed)
    for _ in range(3):
        answers(engine, [request([rng.randrange(500) for _ in range(90)], 1)])


def check_same(got: list, alone: list) -> None:
    for one, other in zip(got, alone):
        assert [output.token_ids for output in one.outputs] == [output.token_ids for output in other.outputs]
        for mine, theirs in zip(one.outputs[0].logprobs or [], other.outputs[0].logprobs or []):
            # A key or value that lies between two numbers may be rounded the other way.
            assert mine.chosen.logprob == pytest.approx(theirs.chosen.logprob, abs=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_comes_back_gives_the_tokens_that_there_are_without_tiers(path, tmp_path, dtype):
    with engine_of(path, kv={"dtype": dtype, **WITHOUT}) as engine:
        assert engine.info.kv_dtype == KV_DTYPES[dtype]
        alone = [answers(engine, [one])[0] for one in work()]
        assert engine.loads().prefix_cache_hit_tokens == 0
    kv = {"dtype": dtype, "disk_path": str(tmp_path), **BELOW}
    with engine_of(path, kv=kv) as engine:
        force_preemptions(engine)
        check_same(answers(engine, work()), alone)
        churn(engine, 1)
        check_same(answers(engine, work()), alone)
        loads = engine.loads()
        assert loads.host_tier_hit_tokens > 0 and loads.host_tier_loaded_bytes > 0
        assert loads.num_swap_preemptions > 3 and loads.swapped_in_bytes > 0
        assert engine._scheduler.blocks.stats.num_copied_blocks > 0
        churn(engine, 2)
    with engine_of(path, kv=kv) as engine:
        check_same(answers(engine, work()), alone)
        assert engine.loads().disk_tier_hit_tokens > 0


@pytest.mark.parametrize(
    ("written", "read"),
    [("fp8", "int8"), ("int8", "fp8"), ("f16", "bf16"), ("f32", "f32, deterministic")],
)
def test_files_of_another_kind_are_misses_even_under_the_right_name(path, tmp_path, written, read):
    """The files are of the same size: only what the label says tells them apart."""

    def ask(kind: str, folder):
        dtype, _, deterministic = kind.partition(", ")
        settings = {"kv": {"dtype": dtype, "disk_path": str(folder)}, "compile": {"deterministic": bool(deterministic)}}
        with engine_of(path, **settings) as engine:
            [update] = answers(engine, [request(SHARED + [3], 6, ignore_eos=True)])
            return token_ids(update), update.usage.cached_tokens, engine.loads().disk_tier_hit_tokens

    folders = {kind: tmp_path / kind for kind in (written, read)}
    cold = {kind: ask(kind, folder)[0] for kind, folder in folders.items()}
    # A label names all tokens up to the block, so that the size says which block of the prefix it is.
    names = {kind: {os.stat(folder / name).st_size: name for name in os.listdir(folder)} for kind, folder in folders.items()}
    assert names[written].keys() == names[read].keys() and len(names[read]) == 8
    assert not set(names[written].values()) & set(names[read].values())
    foreign = tmp_path / "foreign"
    shutil.copytree(folders[written], foreign)
    for size, name in names[written].items():
        shutil.copy(foreign / name, foreign / names[read][size])
    assert ask(read, foreign) == (cold[read], 0, 0)
    assert ask(read, folders[read]) == (cold[read], 64, 64)
