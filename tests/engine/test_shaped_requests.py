"""Penalties, bias, allowed ids and bad words through the engine: what the numpy reference says, whatever else runs.

The oracle runs the whole sequence for each token and keeps no counts: it reads them off the tokens.
"""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from scipy import stats

from jserve.request import SamplingParams
from jserve.weights.load import load_model
from tests.support.arrivals import force_preemptions
from tests.sampling import reference
from tests.sampling.reference import Row
from tests.support.engines import answers, request, run, running_engine, token_ids, wait_idle
from tests.support.tiny_models import full_logits, random_gguf

LONGEST, VOCAB_SIZE, EOS = 64, 512, 510

SETTINGS = {
    "overlap, slots used again": {"scheduler": {"max_num_seqs": 3}},
    "preempted every fifth step": {"scheduler": {"max_num_seqs": 3}},
    "chunks of few tokens, no overlap": {"scheduler": {"max_num_batched_tokens": 5, "max_num_seqs": 3, "overlap": False}},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return random_gguf(tmp_path_factory.mktemp("model") / "model.gguf")


@pytest.fixture(scope="module")
def oracle(path):
    model = load_model(path, "float32")

    def expected(prompt: list[int], params: SamplingParams, bad_words: tuple[tuple[int, ...], ...]) -> list[int]:
        """The output up to where float32 rounding may decide."""
        output: list[int] = []
        while len(output) < params.max_tokens:
            ids = prompt + output
            logits = full_logits(model.params, model.config, ids + [0] * (LONGEST - len(ids)))[len(ids) - 1]
            row = Row(
                temperature=params.temperature, top_k=params.top_k or 0, seed=params.seed or 0, position=len(output),
                banned=(EOS,) if len(output) < (params.min_tokens or 0) else (),
                repetition=params.repetition_penalty or 1.0, presence=params.presence_penalty or 0.0,
                frequency=params.frequency_penalty or 0.0, prompt=tuple(prompt), output=tuple(output),
                bias=tuple(params.logit_bias.items()), allowed=tuple(params.allowed_token_ids or ()),
                word_ends=tuple(word[-1] for word in bad_words if ends_with(output, word[:-1])),
            )
            token_id, is_doubtful = reference.sample(logits, row, VOCAB_SIZE)
            if is_doubtful:
                break
            output.append(token_id)
            if token_id == EOS and not params.ignore_eos:
                break
        return output

    return expected


def ends_with(output: list[int], beginning: tuple[int, ...]) -> bool:
    return not beginning or tuple(output[-len(beginning) :]) == beginning


def random_params(rng: random.Random, tokenizer, letters: list[int], spelled: list[int]) -> dict:
    """What one request asks; of a plain one, nothing.  `spelled` is the prompt's output where only letters are allowed."""
    params = {"max_tokens": rng.randrange(2, 16), "ignore_eos": True}
    if rng.random() < 0.5:
        params |= {"temperature": rng.choice([0.6, 1.0, 2.0]), "seed": rng.randrange(2**40), "top_k": rng.choice([0, 20])}
    if rng.random() < 0.3:
        return params
    if rng.random() < 0.6:
        params |= {"repetition_penalty": rng.choice([0.7, 1.3, 2.0]), "presence_penalty": rng.choice([0.0, 1.5]),
                   "frequency_penalty": rng.choice([0.0, 0.7, -0.5])}
    if rng.random() < 0.3:
        params["logit_bias"] = {rng.randrange(500): rng.uniform(-5, 5) for _ in range(40)}
    if rng.random() < 0.3:
        params["allowed_token_ids"] = rng.sample(range(500), 30)
    if rng.random() < 0.5:
        params |= {"bad_words": rng.sample(words_in(spelled, tokenizer), 3), "allowed_token_ids": letters, "temperature": 0.0}
    if rng.random() < 0.3:
        params |= {"ignore_eos": False, "min_tokens": 2, "logit_bias": {EOS: 100.0}}
        params.pop("allowed_token_ids", None)
    return params


def words_in(spelled: list[int], tokenizer) -> list[str]:
    """Texts of one to three tokens of an output which the tokenizer spells in the same tokens."""
    spans = [spelled[at : at + size] for size in (1, 2, 3) for at in range(len(spelled) - size)]
    return [tokenizer.decode(ids) for ids in spans if tokenizer.encode(tokenizer.decode(ids), add_special=False) == ids]


@pytest.mark.parametrize("settings", SETTINGS)
def test_tokens_equal_the_reference_among_any_neighbours(settings, path, oracle):
    rng = random.Random(settings)
    prefix = [rng.randrange(500) for _ in range(32)]
    prompts = [prefix + [rng.randrange(500)] for _ in range(3)] + [[rng.randrange(500) for _ in range(7)]]
    with running_engine(path, **SETTINGS[settings]) as engine:
        tokenizer, words_of = engine.tokenizer, engine.limits.encode_word
        letters = [token_id for token_id in range(500) if tokenizer.token_text(token_id).isalpha()]
        if "preempted" in settings:
            force_preemptions(engine)
        work = []
        for _ in range(24):
            prompt = rng.choice(prompts)
            only_letters = request(prompt, 12, ignore_eos=True, allowed_token_ids=letters).sampling_params
            spelled = oracle(prompt, only_letters, ())
            work.append((prompt, random_params(rng, tokenizer, letters, spelled), rng.random() * 0.1))

        async def one(prompt, params, delay_s):
            await asyncio.sleep(delay_s)
            return token_ids(await engine.generate_all(request(prompt, **params)))

        async def everything():
            return await asyncio.gather(*(one(*item) for item in work))

        results = run(everything())
        wait_idle(engine)
        if "preempted" in settings:
            assert engine.loads().num_preemptions > 0
    num_bad_words = 0
    for (prompt, params, _), got in zip(work, results):
        asked = request(prompt, **params).sampling_params
        bad_words = sequences(params.get("bad_words", ()), words_of)
        want = oracle(prompt, asked, bad_words)
        assert got[: len(want)] == want, params
        num_bad_words += bool(bad_words) and oracle(prompt, asked, ()) != want
    assert num_bad_words > 1  # they changed something


def sequences(words, encode) -> tuple[tuple[int, ...], ...]:
    found = []
    for word in words:
        bare = word.lstrip() or word
        found += [tuple(encode(bare)), tuple(encode(" " + bare))]
    return tuple(found)


def test_penalties_are_the_same_cold_warm_and_chunked(path):
    """The prompt's tokens count although the cache spares computing them."""
    prompt = [(11 * i) % 97 for i in range(64)]
    asked = request(prompt, 20, repetition_penalty=1.3, presence_penalty=0.5, ignore_eos=True)
    with running_engine(path) as engine:
        cold, warm = answers(engine, [asked])[0], answers(engine, [asked])[0]
        plain = answers(engine, [request(prompt, 20, ignore_eos=True)])[0]
    with running_engine(path, scheduler={"max_num_batched_tokens": 7, "max_num_seqs": 3}) as engine:
        chunked = answers(engine, [asked])[0]
    assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, 48)
    assert token_ids(cold) == token_ids(warm) == token_ids(chunked) != token_ids(plain)


def test_a_bias_decides_the_first_token_too_and_one_on_every_id_changes_nothing(path):
    prompt = [(11 * i) % 97 for i in range(20)]
    with running_engine(path) as engine:
        forced, plain, everywhere = answers(engine, [
            request(prompt, 3, logit_bias={77: 100.0}),
            request(prompt, 6, temperature=1.0, seed=5, ignore_eos=True),
            request(prompt, 6, temperature=1.0, seed=5, ignore_eos=True, logit_bias=dict.fromkeys(range(512), -100.0)),
        ])
    assert token_ids(forced) == [77, 77, 77]
    assert token_ids(everywhere) == token_ids(plain)


@pytest.mark.parametrize("params", [{}, {"presence_penalty": 2.0, "logit_bias": {3: 4.0, 9: -3.0}}], ids=["plain", "shaped"])
def test_first_tokens_follow_the_distribution(params, path):
    """512 seeded samples against the softmax of the model's own logits, shaped."""
    prompt = [(11 * i) % 97 for i in range(20)]
    ids = prompt + [0] * (LONGEST - len(prompt))
    model = load_model(path, "float32")
    row = Row(temperature=8.0, presence=params.get("presence_penalty", 0.0), bias=tuple(params.get("logit_bias", {}).items()))
    with running_engine(path) as engine:
        many = [request(prompt, 1, temperature=8.0, n=64, seed=seed, ignore_eos=True, **params) for seed in range(8)]
        drawn = [output.token_ids[0] for update in answers(engine, many) for output in update.outputs]
    logits = full_logits(model.params, model.config, ids)[len(prompt) - 1]
    p = reference.probabilities(reference.process(logits, row, VOCAB_SIZE), row.temperature)
    groups = np.argsort(p)[::-1].reshape(16, -1)  # 16 groups of 32 ids
    observed = np.bincount(drawn, minlength=VOCAB_SIZE)[groups].sum(1)
    assert len(drawn) == 512 and stats.chisquare(observed, p[groups].sum(1) * 512).pvalue > 1e-3
