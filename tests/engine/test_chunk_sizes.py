"""Prompts of hundreds of tokens in chunks of 1 to 512, cold and from the prefix cache: always the naive oracle's tokens."""

from __future__ import annotations

import dataclasses

import pytest

from jserve.weights.load import load_model
from tests.support.engines import answers, request, running_engine, token_ids
from tests.support.grpc_server import serving
from tests.support.tiny_models import full_logits, random_gguf

LONGEST = 640
SHARED = [(7 * i + i // 61) % 500 for i in range(600)]
PROMPTS = [SHARED[:530] + [3], SHARED, SHARED[:289] + [4, 5], SHARED[:16], SHARED[200:333], [6]]
CHUNKS = (1, 2, 3, 7, 16, 64, 200, 512)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return random_gguf(folder / "model.gguf", context_length=2304, num_layers=1)


@pytest.fixture(scope="module")
def is_naive(path):
    """Whether tokens are the greedy ones behind a prompt, the whole sequence computed at once."""
    model, known = load_model(path, "float32"), set()

    def check(prompt: list[int], tokens: list[int], longest: int = LONGEST) -> bool:
        ids = [*prompt, *tokens]
        if tuple(ids) not in known:
            padded = ids + [0] * (longest - len(ids))  # causal: what follows changes nothing
            best = full_logits(model.params, model.config, padded).argmax(axis=1).tolist()
            if best[len(prompt) - 1 : len(ids) - 1] != tokens:
                return False
            known.add(tuple(ids))
        return True

    return check


@pytest.fixture(scope="module")
def engine(path):
    """Its token budget, which is the longest chunk, is changed between requests."""
    sections = dict(
        kv={"memory_bytes": None, "num_blocks": 150},
        scheduler={"max_num_batched_tokens": 512, "max_num_seqs": 4},
        compile={"token_buckets": (8, 64, 512), "sequence_buckets": (4,)},
    )
    with running_engine(path, every_bucket=True, **sections) as made:
        yield made


@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunks_of_any_size_give_the_same_tokens_cold_and_warm(engine, is_naive, chunk):
    scheduler = engine._scheduler
    limits = scheduler.limits

    def set_budget(budget: int) -> None:
        scheduler.limits = dataclasses.replace(limits, max_num_batched_tokens=budget)

    steps = engine._loop.totals.num_steps
    engine._loop.call(lambda: set_budget(chunk)).result()
    engine._loop.call(scheduler.blocks.flush).result()
    try:
        cold = answers(engine, [request(prompt, 4, ignore_eos=True) for prompt in PROMPTS])
        assert engine._loop.totals.num_steps - steps >= 530 // chunk
        warm = answers(engine, [request(prompt, 4, ignore_eos=True) for prompt in PROMPTS])
    finally:
        engine._loop.call(lambda: set_budget(limits.max_num_batched_tokens)).result()
    for prompt, one, other in zip(PROMPTS, cold, warm):
        assert token_ids(one) == token_ids(other) and is_naive(prompt, token_ids(one))
    assert [one.usage.cached_tokens for one in warm] == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]


async def test_of_2010_shared_and_200_own_tokens_2000_are_cached_and_210_computed(engine, is_naive):
    """Over gRPC, as a client sees it."""
    shared = [(13 * i + i // 83) % 500 for i in range(2010)]
    prompts = [shared + [(first + 3 * i) % 500 for i in range(200)] for first in (1, 2)]
    async with serving(engine) as (_, client):
        cold = await client.generate_unary(request(prompts[0], 3, ignore_eos=True))
        computed = engine._loop.totals.scheduled_tokens
        warm = await client.generate_unary(request(prompts[1], 3, ignore_eos=True))
        computed = engine._loop.totals.scheduled_tokens - computed
    assert (cold.usage.prompt_tokens, cold.usage.cached_tokens) == (2210, 0)
    assert (warm.usage.prompt_tokens, warm.usage.cached_tokens, warm.usage.completion_tokens) == (2210, 2000, 3)
    assert computed == 210 + 2  # and the first two of the three tokens, fed back
    for prompt, update in zip(prompts, (cold, warm)):
        assert is_naive(prompt, token_ids(update), 2240)
