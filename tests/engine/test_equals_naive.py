"""The engine against a naive generate (whole sequence each step, no cache): the same tokens, whatever else runs."""

from __future__ import annotations

import asyncio
import random

import pytest

from jserve.request import FinishReason
from jserve.weights.load import load_model
from tests.support.arrivals import assert_as_naive, force_preemptions, ids_under_arrivals
from tests.support.engines import request, run, running_engine, token_ids
from tests.support.tiny_models import full_logits, random_gguf

LONGEST = 64

HEADS = {
    "grouped 3:1, head 64": dict(num_heads=3, num_kv_heads=1, head_dim=64),
    "grouped 4:2, head 80": dict(num_heads=4, num_kv_heads=2, head_dim=80, d_model=96),
    "multi-head, head 128": dict(num_heads=2, num_kv_heads=2, head_dim=128),
    "multi-query, head 64": dict(num_heads=4, num_kv_heads=1, head_dim=64),
}
SETTINGS = {
    "roomy": {},
    "budget of one token": {"scheduler": {"max_num_batched_tokens": 1, "max_num_seqs": 4}},
    "odd budget, no overlap": {"scheduler": {"max_num_batched_tokens": 17, "max_num_seqs": 3, "overlap": False}},
    "a pool so small that sequences wait": {"kv": {"num_blocks": 6, "memory_bytes": None, "block_size": 16}},
    "preempted every fifth step": {},
    "no prefix cache, block of 4": {"kv": {"prefix_cache": False, "block_size": 4}},
}
CASES = [(heads, "roomy") for heads in HEADS] + [("grouped 3:1, head 64", name) for name in SETTINGS if name != "roomy"]


@pytest.fixture(scope="module")
def expected():
    """Naive continuations, computed once a (model, prompt, length)."""
    known: dict[tuple, list[int]] = {}

    models = {}

    def continuation(path, prompt: list[int], num_tokens: int) -> list[int]:
        if path not in models:
            models[path] = load_model(path, "float32")
        model, ids = models[path], known.setdefault((path, tuple(prompt)), list(prompt))
        while len(ids) < len(prompt) + num_tokens:
            padded = ids + [0] * (LONGEST - len(ids))  # causal: what follows changes nothing; one length compiles once
            ids.append(int(full_logits(model.params, model.config, padded)[len(ids) - 1].argmax()))
        return ids[len(prompt) : len(prompt) + num_tokens]

    return continuation


@pytest.mark.parametrize(("heads", "settings"), CASES)
def test_tokens_equal_the_naive_ones_under_arrivals_and_cancels(heads, settings, tmp_path_factory, expected):
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    random_gguf(path, **HEADS[heads])
    rng = random.Random(f"{heads} {settings}")
    families = [[rng.randrange(500) for _ in range(40)] for _ in range(2)]
    prompts = [rng.choice(families)[: rng.randrange(0, 40)] + [rng.randrange(500)] for _ in range(4)]
    prompts += [[rng.randrange(500)], families[0][:32], families[0][:33]]
    work = [(prompt, rng.randrange(1, 20), rng.random() * 0.05, rng.random() < 0.2) for prompt in prompts * 3]

    with running_engine(path, **SETTINGS[settings]) as engine:
        if settings == "preempted every fifth step":
            force_preemptions(engine)
        results = ids_under_arrivals(engine, work)
        if settings == "preempted every fifth step":
            assert engine.loads().num_preemptions > 0
    assert_as_naive(work, results, lambda prompt, num_tokens: expected(path, prompt, 20)[:num_tokens])


def test_every_bucket_gives_the_same_tokens(tmp_path, expected):
    path = random_gguf(tmp_path / "model.gguf")
    prompt = [(7 * i) % 500 for i in range(37)]
    want = expected(path, prompt, 8)
    for budget, seqs in ((16, 3), (64, 8)):
        limits = {"max_num_batched_tokens": budget, "max_num_seqs": seqs}
        with running_engine(path, every_bucket=True, scheduler=limits) as engine:
            for alone_with in range(seqs):
                others = [request([3 + i, 4], 12, ignore_eos=True) for i in range(alone_with)]

                async def together(others=others):
                    mine = engine.generate_all(request(prompt, 8, ignore_eos=True))
                    return (await asyncio.gather(mine, *(engine.generate_all(o) for o in others)))[0]

                update = run(together())
                assert token_ids(update) == want and update.outputs[0].finish_reason is FinishReason.LENGTH
