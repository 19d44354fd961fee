"""Steps of exactly a bucket's tokens or rows, of one less and of one more, over blocks of a token and of many: the naive tokens."""

from __future__ import annotations

import pytest

from jserve.weights.load import load_model
from tests.support.engines import answers, request, running_engine, token_ids
from tests.support.tiny_models import naive_generate, random_gguf


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return random_gguf(tmp_path_factory.mktemp("model") / "model.gguf")


@pytest.mark.parametrize("budget, seqs, block_size", [(7, 3, 1), (17, 9, 64)])
def test_tokens_are_the_naive_ones_on_either_side_of_every_bucket(path, budget, seqs, block_size):
    model = load_model(path, "float32")
    limits = {"max_num_batched_tokens": budget, "max_num_seqs": seqs}

    def naive(prompt: list[int], count: int) -> list[int]:
        return naive_generate(model.params, model.config, prompt, count, padded_to=32)

    with running_engine(path, every_bucket=True, scheduler=limits, kv={"block_size": block_size}) as engine:
        plan = engine._loop._runner._programs.plan
        assert plan.token_buckets[-1] == budget and plan.sequence_buckets[-1] == seqs
        for size in around(plan.token_buckets):
            prompt = [size, *[3] * (size - 1)]
            assert token_ids(answers(engine, [request(prompt, 2, ignore_eos=True)])[0]) == naive(prompt, 2)
        for rows in around(plan.sequence_buckets):
            prompts = [[row + 1, *[5] * (row % 3)] for row in range(rows)]
            for order in (prompts, prompts[::-1]):
                updates = answers(engine, [request(prompt, 3, ignore_eos=True) for prompt in order])
                assert [token_ids(update) for update in updates] == [naive(prompt, 3) for prompt in order]


def around(buckets: tuple[int, ...]) -> list[int]:
    return sorted({size + by for size in buckets for by in (-1, 0, 1)} - {0})
