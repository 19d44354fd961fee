"""The prefix cache end to end: what is shared, with whom, and that it changes no token."""

from __future__ import annotations

import dataclasses

import pytest

from jserve.weights.load import load_model
from tests.engine.test_parallel_sampling import engine_of
from tests.support.engines import answers, request, run, token_ids
from tests.support.tiny_models import naive_generate, random_gguf

BLOCK = 8
PROMPT = [(11 * i) % 500 for i in range(4 * BLOCK + 1)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return random_gguf(tmp_path_factory.mktemp("model") / "model.gguf")


def naive(model, prompt: list[int], count: int) -> list[int]:
    return naive_generate(model.params, model.config, prompt, count, padded_to=64)


def cached(update) -> int:
    return update.usage.cached_tokens


def test_the_last_token_is_always_computed(path):
    model = load_model(path, "float32")
    with engine_of(path) as engine:
        for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 4 * BLOCK):
            prompt = [length, *PROMPT[1:length]]
            three = [answers(engine, [request(prompt, 5, ignore_eos=True)])[0] for _ in range(3)]
            want = naive(model, prompt, 5)
            assert [token_ids(update) for update in three] == [want] * 3
            assert [cached(update) for update in three] == [0] + [(length - 1) // BLOCK * BLOCK] * 2


def test_nothing_is_shared_across_salts_and_tenants_or_with_bypass(path):
    def ask(**fields):
        return dataclasses.replace(request(PROMPT, 3, ignore_eos=True), **fields)

    with engine_of(path) as engine:
        def hits(**fields) -> int:
            return cached(answers(engine, [ask(**fields)])[0])

        assert [hits(), hits()] == [0, 32]
        assert [hits(cache_salt="a"), hits(cache_salt="a"), hits(cache_salt="b")] == [0, 32, 0]
        assert [hits(tenant="red"), hits(tenant="red", cache_salt="a"), hits(tenant="red")] == [0, 0, 32]
        assert hits(bypass_prefix_cache=True) == 0 and hits() == 32
        assert run(engine.flush_cache()) > 0
        assert hits() == 0
        hit_tokens = engine.loads().prefix_cache_hit_tokens
        assert cached(answers(engine, [request(PROMPT, 2, prompt_logprobs=1)])[0]) == 0
        assert engine.loads().prefix_cache_hit_tokens == hit_tokens


def test_requests_that_come_together_compute_their_beginning_once(path):
    model = load_model(path, "float32")
    prompts = [[*PROMPT[:32], number] for number in range(6)]
    with engine_of(path) as engine:
        updates = answers(engine, [request(prompt, 4, ignore_eos=True) for prompt in prompts])
        # One that comes while the beginning is half done computes the other half itself: that is less than a step.
        assert sorted(map(cached, updates))[2:] == [32] * 4
    for prompt, update in zip(prompts, updates):
        assert token_ids(update) == naive(model, prompt, 4)
