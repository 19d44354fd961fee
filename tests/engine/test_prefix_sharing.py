"""The prefix cache end to end: what is shared, with whom, and that it changes no token."""

from __future__ import annotations

import dataclasses

import pytest

from jserve.engine.step_log import KvSettings
from jserve.kv import BlockManager, GroupSpec
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
            drawn = [answers(engine, [request(prompt, 5, temperature=1.0, seed=7, ignore_eos=True)])[0] for _ in range(3)]
            run(engine.flush_cache())
            cold = answers(engine, [request(prompt, 5, temperature=1.0, seed=7, ignore_eos=True)])[0]
            assert cached(cold) == 0 and [token_ids(update) for update in drawn] == [token_ids(cold)] * 3
            longer = [*prompt, 3]  # what the chain of blocks goes on from
            assert cached(answers(engine, [request(longer, 1)])[0]) == length // BLOCK * BLOCK


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


@pytest.mark.parametrize("hash_block", [None, lambda parent, tokens: b"same"], ids=["tree", "constant hash"])
def test_prompts_that_cancel_out_in_a_hash_do_not_hit(path, monkeypatch, hash_block):
    """Also in a build whose hash is the same for every block: the stored tokens decide."""
    if hash_block is not None:

        def make(self: KvSettings, root_key: bytes = b"", disk=None) -> BlockManager:
            return BlockManager(
                groups=[GroupSpec(window) for window in self.windows], num_blocks=self.num_blocks,
                block_size=self.block_size, num_slots=self.num_slots, max_blocks_per_seq=self.max_blocks_per_seq,
                root_key=root_key, index="hash", hash_block=hash_block, num_host_blocks=self.num_host_blocks,
                host_tier=self.host_tier,
            )

        monkeypatch.setattr(KvSettings, "make", make)
    model = load_model(path, "float32")
    other = [PROMPT[0] + 31, PROMPT[1] - 1, *PROMPT[2:]]  # 31 a + b stays the same
    swapped = [*PROMPT[BLOCK : 2 * BLOCK], *PROMPT[:BLOCK], *PROMPT[2 * BLOCK :]]
    with engine_of(path) as engine:
        for prompt, hits in ((PROMPT, 0), (other, 0), (swapped, 0), (PROMPT, 32 if hash_block is None else BLOCK)):
            [update] = answers(engine, [request(prompt, 4, ignore_eos=True)])
            assert cached(update) == hits and token_ids(update) == naive(model, prompt, 4)


def test_logprobs_of_a_prompt_are_the_same_whatever_is_cached_of_it(path):
    """Such requests compute all of their prompt, and neither ask nor count in the cache's hit rate."""
    prompt = PROMPT[: 3 * BLOCK]
    asked = request(prompt, 2, prompt_logprobs=2, ignore_eos=True)
    with engine_of(path) as engine:
        cold = answers(engine, [asked])[0]
        warm = answers(engine, [asked])[0]
        run(engine.flush_cache())
        answers(engine, [request([*prompt[: 2 * BLOCK], 9, 9, 9], 2, ignore_eos=True)])
        before = engine.loads().prefix_cache_queried_tokens
        partly = answers(engine, [asked])[0]
        assert engine.loads().prefix_cache_queried_tokens == before
    for one in (cold, warm, partly):
        assert cached(one) == 0 and one.prompt_logprobs[0] is None and len(one.prompt_logprobs) == len(prompt)
        for mine, first in zip(one.prompt_logprobs[1:], cold.prompt_logprobs[1:]):
            assert [entry.token_id for entry in mine.top] == [entry.token_id for entry in first.top]
            assert mine.chosen.logprob == pytest.approx(first.chosen.logprob, abs=1e-5)
