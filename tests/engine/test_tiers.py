"""Prefixes that come back from host memory and from disk give the tokens and log-probabilities of cold ones."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random

import pytest

from jserve.config import ConfigError
from jserve.engine.build import build_engine
from jserve.weights.load import load_model
from tests.engine.test_parallel_sampling import engine_of
from tests.support.engines import answers, config_for, request, run, token_ids, wait_idle
from tests.support.tiny_models import full_logits, random_gguf

SHARED = [(7 * i) % 500 for i in range(64)]  # eight blocks of 8
LONGEST = 80


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return random_gguf(tmp_path_factory.mktemp("model") / "model.gguf")


@pytest.fixture(scope="module")
def naive(path):
    """Greedy continuations with no cache; of one length, so that one program is compiled."""
    model = load_model(path, "float32")

    def continuation(prompt: list[int], count: int) -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            padded = ids + [0] * (LONGEST - len(ids))  # causal: what follows changes nothing
            ids.append(int(full_logits(model.params, model.config, padded)[len(ids) - 1].argmax()))
        return ids[len(prompt) :]

    return continuation


def ask(engine, prompt, count=6, **options):
    [update] = answers(engine, [request(prompt, count, ignore_eos=True, logprobs=2, **options)])
    return update


def churn(engine, seed: int = 1) -> None:
    """Fills the pool of 23 blocks with something else."""
    rng = random.Random(seed)
    for _ in range(3):
        ask(engine, [rng.randrange(500) for _ in range(90)], 1)


def same(one, other) -> None:
    assert token_ids(one) == token_ids(other)
    for left, right in zip(one.outputs[0].logprobs, other.outputs[0].logprobs):
        assert left.chosen.logprob == pytest.approx(right.chosen.logprob, abs=1e-5)
        assert [entry.token_id for entry in left.top] == [entry.token_id for entry in right.top]


@pytest.mark.parametrize("overlap", [True, False])
def test_cold_warm_host_and_disk_hits_give_the_same(path, naive, tmp_path, overlap):
    options = dict(kv={"disk_path": str(tmp_path / "kv")}, scheduler={"overlap": overlap})
    prompt = SHARED + [3, 4]
    with engine_of(path, **options) as engine:
        cold = ask(engine, prompt)
        assert token_ids(cold) == naive(prompt, 6) and cold.usage.cached_tokens == 0
        warm = ask(engine, prompt)
        churn(engine)
        from_host = ask(engine, prompt)
        loads = engine.loads()
        assert (loads.host_tier_hit_tokens, loads.disk_tier_hit_tokens) == (64, 0)
        assert loads.host_tier_saved_bytes > 0 and loads.host_tier_loaded_bytes > 0 == loads.swapped_in_bytes
        churn(engine, 2)
    with engine_of(path, **options) as engine:
        from_disk = ask(engine, prompt)
        loads = engine.loads()
        assert loads.disk_tier_hit_tokens == 64 and loads.disk_tier_loaded_bytes > 0
    for one in (warm, from_host, from_disk):
        assert one.usage.cached_tokens == 64
        same(one, cold)


def test_what_is_cached_at_the_end_is_there_after_a_restart(path, tmp_path):
    with engine_of(path, kv={"disk_path": str(tmp_path)}) as engine:
        cold = ask(engine, SHARED)
        assert not os.listdir(tmp_path)
    with engine_of(path, kv={"disk_path": str(tmp_path)}) as engine:
        again = ask(engine, SHARED)
    assert again.usage.cached_tokens == 56
    same(again, cold)


def test_flush_salt_and_bypass_hold_for_the_tiers(path, tmp_path):
    options = dict(kv={"disk_path": str(tmp_path)})
    with engine_of(path, **options) as engine:
        ask(engine, SHARED)
        churn(engine)
    with engine_of(path, **options) as engine:
        salted = dataclasses.replace(request(SHARED, 2), cache_salt="mine")
        bypassing = dataclasses.replace(request(SHARED, 2), bypass_prefix_cache=True)
        assert [one.usage.cached_tokens for one in answers(engine, [salted, bypassing])] == [0, 0]
        run(engine.flush_cache())
        assert ask(engine, SHARED).usage.cached_tokens == 0
        assert engine.loads().disk_tier_hit_tokens == 0


def test_a_disk_that_cannot_be_used_is_one_log_line(path, tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with engine_of(path, kv={"disk_path": str(blocked)}) as engine:
        cold = ask(engine, SHARED)
        churn(engine)
        same(ask(engine, SHARED), cold)
    assert len([record for record in caplog.records if "not kept" in record.message]) == 1


def test_damaged_files_are_misses(path, tmp_path):
    with engine_of(path, kv={"disk_path": str(tmp_path)}) as engine:
        cold = ask(engine, SHARED)
        churn(engine)
    for at, name in enumerate(sorted(os.listdir(tmp_path))):
        content = (tmp_path / name).read_bytes()
        damaged = (content[:-40] + b"!" + content[-39:], content[:100], b"", content[40:])[at % 4]
        (tmp_path / name).write_bytes(damaged)
    (tmp_path / "notes.txt").write_text("mine")
    with engine_of(path, kv={"disk_path": str(tmp_path)}) as engine:
        again = ask(engine, SHARED)
        assert again.usage.cached_tokens == 0
        same(again, cold)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_disk_needs_host_memory(path, tmp_path):
    with pytest.raises(ConfigError, match="kv.disk_path.*host_memory_bytes"):
        build_engine(config_for(path, kv={"disk_path": str(tmp_path), "host_memory_bytes": 0}))


@pytest.mark.parametrize(("num_blocks", "host_bytes", "kind", "has_disk"), [
    (24, None, "recompute", False), (24, 120_000, "swap", True), (12, 300_000, "auto", True),
])
def test_a_fuzz_of_families_equals_the_naive_oracle(path, naive, tmp_path, num_blocks, host_bytes, kind, has_disk):
    rng = random.Random(num_blocks)
    families = [[rng.randrange(500) for _ in range(48)] for _ in range(3)]
    prompts = [family[: rng.randrange(8, 48)] + [rng.randrange(500)] for family in families for _ in range(3)]
    prompts = [prompt[: 8 * (num_blocks - 3)] for prompt in prompts]
    expected = [naive(prompt, 8) for prompt in prompts]
    kv = {"num_blocks": num_blocks, "host_memory_bytes": host_bytes, "preemption": kind, "poison_freed": True}
    if has_disk:
        kv["disk_path"] = str(tmp_path)
    work = [rng.randrange(len(prompts)) for _ in range(40)]
    hits = 0
    for _ in range(1 + has_disk):
        with engine_of(path, kv=kv) as engine:

            async def one(at: int, delay_s: float, cancels: bool):
                await asyncio.sleep(delay_s)
                got: list[int] = []
                updates = engine.generate(request(prompts[at], 8, ignore_eos=True))
                async for update in updates:
                    got += [token for delta in update.outputs for token in delta.token_ids]
                    if cancels:
                        break
                await updates.aclose()
                assert got == expected[at][: len(got)] and (cancels or len(got) == 8)

            async def everything():
                await asyncio.gather(*(one(at, rng.random() * 0.4, rng.random() < 0.2) for at in work))

            run(everything())
            wait_idle(engine)
            loads = engine.loads()
            hits += loads.host_tier_hit_tokens + loads.disk_tier_hit_tokens
    assert hits > 0
