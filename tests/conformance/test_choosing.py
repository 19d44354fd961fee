"""Fields that decide which token is drawn: temperature, top_k, top_p, min_p, seed, penalties, biases and masks."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.conformance import alone, conforms, ids, only, request

pytestmark = pytest.mark.xdist_group("conformance")

DRAWN = {"temperature": 2.0, "max_tokens": 12, "ignore_eos": True, "logprobs": 0}
DIGITS = list(range(33, 42))
"""Ids of the tokens "1" to "9"."""
COUNTING = {"max_tokens": 18, "allowed_token_ids": DIGITS}


def ranks(update) -> list[int]:
    return [entry.chosen.rank for entry in only(update).logprobs]


@conforms("temperature")
def test_temperature(ask):
    """0 takes the most probable token; the higher, the less probable what is drawn."""
    assert set(ranks(ask(logprobs=0))) == {1}
    mean_rank = [sum(ranks(ask(**{**DRAWN, "temperature": t, "seed": 5}))) for t in (0.3, 1.0, 3.0)]
    assert mean_rank[0] < mean_rank[1] < mean_rank[2]


@conforms("top_k")
def test_top_k(ask):
    assert max(ranks(ask(**DRAWN, seed=1, top_k=3))) in (2, 3)
    assert max(ranks(ask(**DRAWN, seed=1))) > 3


@conforms("top_p")
def test_top_p(ask):
    assert set(ranks(ask(**DRAWN, seed=1, top_p=1e-6))) == {1}
    assert max(ranks(ask(**DRAWN, seed=1, top_p=0.3))) < max(ranks(ask(**DRAWN, seed=1)))


@conforms("min_p")
def test_min_p(ask):
    assert set(ranks(ask(**DRAWN, seed=1, min_p=1.0))) == {1}
    assert max(ranks(ask(**DRAWN, seed=1, min_p=0.2))) < max(ranks(ask(**DRAWN, seed=1)))


@conforms("seed")
def test_seed(ask):
    few = {**DRAWN, "max_tokens": 5}
    drawn = {seed: ids(ask(**few, seed=seed)) for seed in (7, 8, -(2**63), 2**63 - 1)}
    assert ids(ask(**few, seed=7)) == drawn[7]
    assert len(set(map(tuple, drawn.values()))) == 4
    assert ids(ask(**few)) != ids(ask(**few))  # unset: drawn from the system


@conforms("repetition_penalty")
def test_repetition_penalty(ask):
    """It counts the prompt and the output: of nine digits, each of the eight that the prompt lacks comes once."""
    [one] = set(DIGITS) & set(ids(ask("1 1 1 1 1 1", max_tokens=1, allowed_token_ids=DIGITS)))
    penalised = ids(ask("1 1 1 1 1 1", max_tokens=8, allowed_token_ids=DIGITS, repetition_penalty=100.0))
    assert one not in penalised and len(set(penalised)) == 8


@conforms("presence_penalty")
def test_presence_penalty(ask):
    """A reward for what has come keeps to few tokens, a penalty looks for new ones."""
    kinds = [len(set(ids(ask(**COUNTING, presence_penalty=penalty)))) for penalty in (-2.0, 0.0, 2.0)]
    assert kinds[0] <= kinds[1] <= kinds[2] and kinds[0] < kinds[2]


@conforms("frequency_penalty")
def test_frequency_penalty(ask):
    """Every repetition counts: a reward ends in one token for good, a penalty spreads evenly."""
    rewarded, penalised = (ids(ask(**COUNTING, frequency_penalty=penalty)) for penalty in (-2.0, 2.0))
    assert len(set(rewarded[-8:])) == 1
    assert max(Counter(penalised).values()) <= 4 < max(Counter(rewarded).values())


@conforms("logit_bias")
def test_logit_bias(ask):
    assert ids(ask(max_tokens=4, logit_bias={1000: 100.0})) == [1000] * 4
    first = ids(ask())[0]
    assert first not in ids(ask(logit_bias={first: -100.0}))


@conforms("allowed_token_ids")
def test_allowed_token_ids(ask):
    allowed = [500, 600, 700]
    assert not set(allowed) & set(ids(ask()))
    for temperature in (0.0, 2.0):
        assert set(ids(ask(temperature=temperature, allowed_token_ids=allowed))) <= set(allowed)


@conforms("bad_words")
def test_bad_words(ask):
    """One word, and two together: then the first alone may come."""
    prompt = "One, two, three, four,"
    plain = ask(prompt, max_tokens=6)
    words = only(plain).text.split()
    assert words[0] not in only(ask(prompt, max_tokens=6, bad_words=[words[0].strip(",")])).text
    together = " ".join(words[:2])
    without = ask(prompt, max_tokens=6, bad_words=[together])
    assert ids(without)[0] == ids(plain)[0] and together not in only(without).text


@alone
def test_a_request_gets_the_same_among_neighbours_of_every_variant(ask, ask_together):
    """Greedy, drawn, with logprobs, with penalties, with a grammar: alone and all in one batch."""
    mixed = [
        request(), request(logprobs=3), request(**DRAWN, seed=3), request(temperature=0.8, seed=4, top_p=0.9, top_k=50),
        request(**COUNTING, frequency_penalty=1.0), request(temperature=1.0, seed=5, logit_bias={260: 5.0}),
        request(regex="[a-z ]{5,20}"), request(min_tokens=6, bad_words=["Paris", "the city"]),
    ]
    from_alone = [ids(ask_together([one])[0]) for one in mixed]
    assert [ids(update) for update in ask_together(mixed)] == from_alone
