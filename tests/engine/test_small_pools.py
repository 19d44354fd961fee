"""Pools down to a single block: what cannot fit is refused with the numbers, what outgrows it ends, all others are served."""

from __future__ import annotations

import random

import pytest

from jserve.request import Code, FinishReason, RequestError
from jserve.weights.load import load_model
from tests.support.engines import answers, request, running_engine, token_ids
from tests.support.tiny_models import full_logits, random_gguf

BLOCK = 16
LONGEST = 64


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return random_gguf(tmp_path_factory.mktemp("model") / "model.gguf")


@pytest.fixture(scope="module")
def is_naive(path):
    """Whether tokens are the greedy ones behind a prompt, the whole sequence computed at once."""
    model = load_model(path, "float32")

    def check(prompt: list[int], tokens: list[int]) -> bool:
        ids = [*prompt, *tokens]
        best = full_logits(model.params, model.config, ids + [0] * (LONGEST - len(ids))).argmax(axis=1).tolist()
        return best[len(prompt) - 1 : len(ids) - 1] == tokens

    return check


def pool_of(path, num_blocks: int, **kv):
    return running_engine(path, kv={"block_size": BLOCK, "num_blocks": num_blocks, "memory_bytes": None, **kv})


@pytest.mark.parametrize("num_blocks", [2, 4], ids=["one usable block", "three usable blocks"])
def test_a_hundred_at_once_are_served_to_their_end(path, is_naive, num_blocks):
    rng, room = random.Random(num_blocks), BLOCK * (num_blocks - 1)
    families = [[rng.randrange(500) for _ in range(room)] for _ in range(3)]
    work = []
    for _ in range(100):
        prompt = rng.choice(families)[: rng.randrange(room - 1)] + [rng.randrange(500)]
        work.append((prompt, rng.randint(1, min(12, room + 1 - len(prompt)))))
    with pool_of(path, num_blocks) as engine:
        got = answers(engine, [request(prompt, count, ignore_eos=True) for prompt, count in work])
        loads = engine.loads()
    assert loads.requests_length == 100
    for (prompt, count), update in zip(work, got):
        assert len(token_ids(update)) == count and is_naive(prompt, token_ids(update))


def test_what_can_never_fit_is_refused_with_the_numbers_and_others_are_served(path, is_naive):
    with pool_of(path, 4) as engine:
        with pytest.raises(RequestError) as refused:
            answers(engine, [request(list(range(49)), 4)])
        assert refused.value.code is Code.INVALID_ARGUMENT
        assert "49 tokens" in refused.value.message and "48 tokens" in refused.value.message
        [small] = answers(engine, [request([1, 2, 3, 4], 4, ignore_eos=True)])
        assert is_naive([1, 2, 3, 4], token_ids(small))


@pytest.mark.parametrize("num_alike", [1, 3])
def test_what_outgrows_the_pool_ends_with_length(path, is_naive, num_alike):
    """Alone; or beside others, once they have all been alone in it."""
    prompts = [[(5 * i + first) % 500 for i in range(28)] for first in range(num_alike)]
    with pool_of(path, 4) as engine:
        got = answers(engine, [request(prompt, 200, ignore_eos=True) for prompt in prompts])
    for prompt, update in zip(prompts, got):
        assert update.outputs[0].finish_reason is FinishReason.LENGTH
        assert len(token_ids(update)) == 48 - 28 + 1  # the last one needs no place
        assert is_naive(prompt, token_ids(update))
