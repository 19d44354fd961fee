"""Models with windows through the real engine: the tokens of transformers and of a naive run, in bounded memory."""

from __future__ import annotations

import random

import numpy as np
import pytest

from jserve.weights.load import load_model
from tests.support.arrivals import assert_as_naive, force_preemptions, ids_under_arrivals
from tests.support.engines import answers, request, running_engine, token_ids
from tests.support.tiny_models import full_logits, transformers_model
from tests.support.tokenizer_folders import tiny_byte_level_tokenizer

pytest.importorskip("transformers")
pytestmark = pytest.mark.xdist_group("windows")  # the programs of the models are compiled once

WINDOW, LONGEST = 12, 96
MODELS = {
    "all windows": ("Mistral", dict(sliding_window=WINDOW)),
    "alternating, soft caps": ("Gemma2", dict(sliding_window=WINDOW, attn_logit_softcapping=20.0)),
    "thirds, rope by layer": (
        "Gemma3",
        dict(
            sliding_window=WINDOW, num_hidden_layers=3, layer_types=["sliding_attention"] * 2 + ["full_attention"],
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        ),
    ),
}  # fmt: skip
SMALL = {
    "kv": {"block_size": 4, "num_blocks": 29, "memory_bytes": None},
    "scheduler": {"max_num_batched_tokens": 16, "max_num_seqs": 4},
}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    """(folder, transformers' model)"""
    name, settings = MODELS[request.param]
    folder = tmp_path_factory.mktemp("model")
    made = transformers_model(folder, name, spread=0.3, **settings)
    tiny_byte_level_tokenizer(folder)
    return folder, made


class Naive:
    """Greedy continuations, the whole sequence at once for each token."""

    def __init__(self, folder):
        self.loaded = load_model(folder, "float32")
        self.known: dict[tuple, list[int]] = {}

    def __call__(self, prompt: list[int], count: int) -> list[int]:
        ids = self.known.setdefault(tuple(prompt), list(prompt))
        while len(ids) < len(prompt) + count:
            padded = ids + [0] * (LONGEST - len(ids))
            ids.append(int(full_logits(self.loaded.params, self.loaded.config, padded, "xla")[len(ids) - 1].argmax()))
        return ids[len(prompt) : len(prompt) + count]


def test_greedy_tokens_are_those_of_transformers_and_blocks_stay_few(model):
    import torch

    folder, theirs = model
    prompt = np.random.default_rng(3).integers(3, 96, 50).tolist()
    with torch.no_grad():
        expected = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=40, min_new_tokens=40, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
    with running_engine(folder, **SMALL) as engine:
        check, most = engine._loop.on_step, [0] * engine._scheduler.blocks.num_groups
        groups = engine._scheduler.blocks._memory.groups

        def on_step(scheduler) -> None:
            check(scheduler)
            for number, pool in enumerate(scheduler.blocks._memory.pools):
                most[number] = max(most[number], pool.num_used)

        engine._loop.on_step = on_step
        [answer] = answers(engine, [request(prompt, 40, ignore_eos=True)])
    assert token_ids(answer) == expected
    for group, count in zip(groups, most):
        if group.window is None:
            assert count >= 89 // 4
        else:
            assert count <= group.num_blocks_held(2 * 16 + 1, 4) < 89 // 4


def work(rng: random.Random):
    families = [[rng.randrange(3, 96) for _ in range(50)] for _ in range(2)]
    prompts = [rng.choice(families)[: rng.randrange(0, 50)] + [rng.randrange(3, 96)] for _ in range(5)]
    prompts += [families[0][:40], families[0][:41], families[0][:12]]
    return [(prompt, rng.randrange(1, 24), rng.random() * 0.05, rng.random() < 0.2) for prompt in prompts * 3]


@pytest.mark.parametrize("kind", ["recompute", "swap"])
def test_tokens_equal_the_naive_ones_under_preemption_in_a_small_pool(model, kind):
    folder, _ = model
    naive, items = Naive(folder), work(random.Random(kind))
    settings = {**SMALL, "kv": {**SMALL["kv"], "preemption": kind}}
    with running_engine(folder, **settings) as engine:
        force_preemptions(engine, every=7)
        results = ids_under_arrivals(engine, items)
        loads = engine.loads()
        assert loads.num_preemptions > 3 and (loads.num_swap_preemptions > 0) == (kind == "swap")
        assert loads.prefix_cache_hit_tokens > 0
    assert_as_naive(items, results, naive)


def test_samples_and_beams_are_the_same_alone_and_in_a_small_pool(model):
    folder, _ = model
    prompt = np.random.default_rng(4).integers(3, 96, 30).tolist()
    asked = [
        request(prompt, 20, n=3, temperature=1.0, seed=7, ignore_eos=True),
        request(prompt[:21], 12, beam_width=3, n=3, temperature=None),
        request(prompt, 14, ignore_eos=True),
    ]
    with running_engine(folder, **{**SMALL, "kv": {**SMALL["kv"], "prefix_cache": False}}) as engine:
        alone = [answers(engine, [one])[0] for one in asked]
        assert engine.loads().num_preemptions == 0
    with running_engine(folder, **SMALL) as engine:
        together = answers(engine, asked * 2)
    for one, other in zip(together, alone * 2):
        assert [o.token_ids for o in one.outputs] == [o.token_ids for o in other.outputs]


def test_a_prompt_that_begins_as_another_takes_what_all_groups_have(model):
    folder, _ = model
    prompt = np.random.default_rng(5).integers(3, 96, 45).tolist()
    with running_engine(folder, **SMALL) as engine:
        [first] = answers(engine, [request(prompt, 4, ignore_eos=True)])
        [second] = answers(engine, [request(prompt, 4, ignore_eos=True)])
        [third] = answers(engine, [request([*prompt[:33], 5, 6], 4, ignore_eos=True)])
    assert token_ids(first) == token_ids(second)
    assert (first.usage.cached_tokens, second.usage.cached_tokens, third.usage.cached_tokens) == (0, 44, 32)
    assert token_ids(third) == Naive(folder)([*prompt[:33], 5, 6], 4)
