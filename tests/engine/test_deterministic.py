"""--deterministic: a request has the same bits among any neighbours, in any chunks, cold or warm, preempted or not."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from jserve.config import ConfigError
from jserve.engine.build import build_engine
from tests.engine.test_preemption import preempt_every
from tests.support.engines import answers, config_for, request, run, running_engine, wait_idle
from tests.support.smollm2 import smollm2_gguf
from tests.support.tiny_models import random_gguf

NUM_MEETINGS = int(os.environ.get("JSERVE_TEST_MEETINGS", "200"))
SETTINGS = {
    "budget 40, swap": dict(scheduler={"max_num_batched_tokens": 40, "max_num_seqs": 12}, kv={"preemption": "swap"}),
    "budget 7, no overlap, recompute": dict(
        scheduler={"max_num_batched_tokens": 7, "max_num_seqs": 5, "overlap": False},
        kv={"block_size": 32, "preemption": "recompute"},
    ),
}
"""The pool has room for every sequence; preemptions are forced.  The budget decides how prompts are cut."""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return random_gguf(tmp_path_factory.mktemp("model") / "model.gguf", num_heads=6, num_kv_heads=2, head_dim=64)


def watched() -> list:
    """Requests whose answers are compared: long and short prompts, greedy and drawn, with penalties and scores."""
    long, short = [(5 * i) % 499 for i in range(70)], [3, 1, 4]
    drawn = dict(temperature=1.0, seed=11, top_p=0.95)
    return [
        request(long, 12, logprobs=5, ignore_eos=True),
        request(short, 30, logprobs=3, ignore_eos=True, **drawn),
        request(long[:33], 20, logprobs=1, ignore_eos=True, repetition_penalty=1.2, presence_penalty=0.5, **drawn),
        request(long[:50], 3, logprobs=1, prompt_logprobs=4, ignore_eos=True),
        request(short, 8, logprobs=2, n=3, ignore_eos=True, **drawn),
    ]


def neighbour(rng: random.Random):
    prompt = [rng.randrange(500) for _ in range(rng.choice([1, 2, 5, 17, 40, 64]))]
    if rng.random() < 0.3:
        prompt = [(5 * i) % 499 for i in range(rng.randrange(1, 60))]  # a beginning of the watched one's
    kind = rng.choice([{}, {"temperature": 0.8}, {"logprobs": 20}, {"presence_penalty": 1.0}, {"regex": "[a-z]{9}"}])
    return request(prompt, rng.randrange(1, 15), ignore_eos="regex" not in kind, seed=rng.randrange(99), **kind)


def bits(update) -> tuple:
    """Everything numeric of an answer; floats compare exactly."""
    outputs = sorted(update.outputs, key=lambda output: output.index)
    return (
        [(one.token_ids, one.text, one.cumulative_logprob, one.logprobs) for one in outputs], update.prompt_logprobs
    )


async def meet(engine, asked: list, others: list, rng: random.Random) -> list:
    """The answers to what is asked, which arrives a little apart and among others."""

    async def later(one):
        await asyncio.sleep(rng.random() * 0.02)
        return await engine.generate_all(one)

    mine, theirs = [later(one) for one in asked], [later(one) for one in others]
    return (await asyncio.gather(*mine, *theirs))[: len(mine)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_bits_among_random_neighbours(path, name):
    rng = random.Random(name)
    with running_engine(path, **SETTINGS[name], compile={"deterministic": True}) as engine:
        assert engine.info.attention == "aligned" and engine.info.capabilities["deterministic"]
        expected = [bits(answers(engine, [one])[0]) for one in watched()]  # alone, one after the other
        check, num_met, round_ = engine._loop.on_step, 0, 0
        while num_met * len(SETTINGS) < NUM_MEETINGS:
            engine._loop.on_step = check
            if round_ % 3 == 0:
                preempt_every(engine, rng.choice([3, 4, 7]), most=4)
            if round_ % 4 == 3:
                run(engine.flush_cache())
            others = [neighbour(rng) for _ in range(rng.choice([0, 1, 3, 6]))]
            answers_now = run(meet(engine, watched(), others, rng), 300)
            for at, update in enumerate(answers_now):
                assert bits(update) == expected[at], f"round {round_}, request {at}"
            num_met, round_ = num_met + len(answers_now), round_ + 1
            wait_idle(engine)
        engine._loop.on_step = check
        assert engine.loads().num_preemptions > 0


@pytest.mark.timeout(900)
def test_the_real_model_too():
    asked = [
        request("The capital of France is", 6, logprobs=5, ignore_eos=True),
        request("Once upon a time", 6, logprobs=3, temperature=1.0, seed=4, ignore_eos=True, prompt_logprobs=2),
    ]
    rng = random.Random(1)
    limits = {"max_num_batched_tokens": 32, "max_num_seqs": 8}
    with running_engine(smollm2_gguf(), scheduler=limits, compile={"deterministic": True}) as engine:
        expected = [bits(answers(engine, [one])[0]) for one in asked]
        for _ in range(10):
            others = [
                request([rng.randrange(40_000) for _ in range(rng.choice([1, 9, 30]))], rng.randrange(1, 6))
                for _ in range(rng.choice([1, 3, 5]))
            ]
            assert [bits(update) for update in run(meet(engine, asked, others, rng), 300)] == expected


def test_buckets_and_other_attention_are_refused(path):
    for section, values, named in (
        ("compile", {"token_buckets": (16,)}, "compile.token_buckets"),
        ("kernel", {"attention": "xla"}, "kernel.attention"),
        ("parallel", {"tensor_parallel_size": 2}, "on one device"),
    ):
        config = config_for(path, compile={"deterministic": True})
        with pytest.raises(ConfigError, match=named):
            build_engine(config.replace(section, **values))
