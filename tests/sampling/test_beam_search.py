"""Beam search against HF transformers' algorithm written out, against exhaustive search, and by closed form."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from jserve.request import EarlyStopping, FinishReason, Sampling
from jserve.sampling.beam_search import BeamSearch, Candidates

EOS = 3
PARAMS = Sampling(
    temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, max_tokens=8, min_tokens=0, stop=(),
    stop_token_ids=frozenset(), eos_token_ids=frozenset([EOS]), banned_below_min_tokens=(),
    include_stop_str_in_output=False, skip_special_tokens=True, logprobs=None, prompt_logprobs=None,
)


class Model:
    """Log-probabilities that depend on all tokens before."""

    def __init__(self, vocab_size: int, seed: int, eos_bonus: float = 0.0):
        self.vocab_size, self._seed, self._bonus = vocab_size, seed, eos_bonus

    def logprobs(self, tokens) -> np.ndarray:
        logits = np.random.default_rng([self._seed, *tokens]).standard_normal(self.vocab_size) * 2
        logits[EOS % self.vocab_size] += self._bonus
        return (logits - np.log(np.exp(logits).sum())).astype(np.float32)


def searched(model: Model, find_stop=None, **changes):
    params = dataclasses.replace(PARAMS, **changes)
    search, live = BeamSearch(params, find_stop), [()]
    for _ in range(params.max_tokens):
        for number, tokens in enumerate(live):
            row = model.logprobs(tokens)
            order = np.argsort(-row, kind="stable")[:128].astype(np.int32)
            search.report(number, Candidates(order, row[order]))
        assert search.is_due
        moves = search.advance()
        if not moves:
            break
        live = [(*live[move.parent], move.token_id) for move in moves]
    else:
        raise AssertionError("the search went on beyond max_tokens")
    return search


def found(search) -> list[tuple[tuple[int, ...], float]]:
    return [(tuple(token.token_id for token in one.last.path()), one.score) for one in search.best()]


def transformers_search(model: Model, width, max_tokens, penalty, rule) -> list[tuple[tuple[int, ...], float]]:
    """generation/utils.py `_beam_search` (5.x) for a batch of one, in its own order and with its own sentinels."""
    low = -1.0e9
    running, scores = [()] * width, np.array([0.0] + [low] * (width - 1))
    ended, ended_scores, is_ended = [()] * width, np.full(width, low), np.zeros(width, bool)
    length, improves = 0, True
    while True:
        table = np.stack([scores[i] + model.logprobs(running[i]).astype(np.float64) for i in range(width)]).ravel()
        top = np.argsort(-table, kind="stable")[: 2 * width]
        top_scores = table[top]
        rows = [(*running[at // model.vocab_size], int(at % model.vocab_size)) for at in top]
        hits = np.array([row[-1] == EOS or len(row) >= max_tokens for row in rows])
        best_running = np.argsort(-(top_scores + hits * low), kind="stable")[:width]
        now_ended = hits & (np.arange(len(rows)) < width)
        candidate_scores = top_scores / (length + 1) ** penalty
        candidate_scores += low * (is_ended.all() and rule is EarlyStopping.FIRST)
        candidate_scores += low * (not improves) + low * ~now_ended
        merged = np.concatenate([ended_scores, candidate_scores])
        keep = np.argsort(-merged, kind="stable")[:width]
        all_rows, all_ended = ended + rows, np.concatenate([is_ended, now_ended])
        ended, ended_scores, is_ended = [all_rows[i] for i in keep], merged[keep], all_ended[keep]
        running, scores = [rows[i] for i in best_running], (top_scores + hits * low)[best_running]
        length += 1
        ahead = max_tokens if rule is EarlyStopping.NEVER and penalty > 0 else length
        worst = np.where(is_ended, ended_scores.min(), low)
        improves = improves and bool((scores[0] / ahead**penalty > worst).any())
        if not improves or (is_ended.all() and rule is EarlyStopping.FIRST) or hits.all():
            return list(zip(ended, ended_scores.tolist()))


@pytest.mark.parametrize("rule", EarlyStopping)
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("width", [2, 3, 8])
def test_equals_the_algorithm_of_transformers(width, penalty, rule):
    for seed, bonus, most in itertools.product(range(4), (0.0, 2.5), (1, 7)):
        model = Model(40, seed, bonus)
        mine = found(
            searched(model, beam_width=width, n=width, max_tokens=most, length_penalty=penalty, early_stopping=rule)
        )
        theirs = transformers_search(model, width, most, penalty, rule)
        assert [tokens for tokens, _ in mine] == [tokens for tokens, _ in theirs]
        assert [score for _, score in mine] == pytest.approx([score for _, score in theirs], abs=1e-5)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_wide_enough_is_exhaustive_also_beyond_the_vocabulary(penalty):
    model, most = Model(5, 7), 3
    outputs = {}
    for tokens in itertools.product(range(5), repeat=most):
        tokens = tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens
        total = sum(float(model.logprobs(tokens[:i])[token]) for i, token in enumerate(tokens))
        outputs[tokens] = total / len(tokens) ** penalty
    ranked = sorted(outputs.items(), key=lambda item: -item[1])
    mine = found(
        searched(model, beam_width=64, n=10, max_tokens=most, length_penalty=penalty, early_stopping=EarlyStopping.NEVER)
    )
    assert [tokens for tokens, _ in mine] == [tokens for tokens, _ in ranked[:10]]
    assert [score for _, score in mine] == pytest.approx([score for _, score in ranked[:10]], abs=1e-5)


def test_the_length_that_divides_counts_generated_tokens_with_eos():
    class Constant:
        vocab_size = 4

        def logprobs(self, tokens):
            return np.array([-1.0, -9.0, -9.0, -1.5 if len(tokens) == 1 else -20.0], np.float32)

    for penalty in (0.0, 1.0, 2.0):
        search = searched(
            Constant(), beam_width=2, n=2, max_tokens=4, length_penalty=penalty, early_stopping=EarlyStopping.NEVER
        )
        scores = dict(found(search))
        assert scores[(0, 0, 0, 0)] == pytest.approx(-4.0 / 4**penalty)
        assert scores[(0, EOS)] == pytest.approx(-2.5 / 2**penalty)


def test_stop_ids_and_strings_end_a_beam_and_min_tokens_holds_them_off():
    model = Model(40, 1, 2.0)
    search = searched(
        model, beam_width=3, n=3, max_tokens=6, stop_token_ids=frozenset(range(0, 40, 5)),
        find_stop=lambda ids: "odd" if ids[-1] % 5 == 1 else None,
    )
    for one in search.best():
        ids = [token.token_id for token in one.last.path()]
        assert not any(token % 5 in (0, 1) or token == EOS for token in ids[:-1])
        if ids[-1] % 5 == 0:
            assert (one.reason, one.matched_stop) == (FinishReason.STOP, ids[-1])
        elif ids[-1] % 5 == 1:
            assert (one.reason, one.matched_stop) == (FinishReason.STOP, "odd")
    held = searched(
        model, beam_width=3, n=3, max_tokens=6, min_tokens=4, stop_token_ids=frozenset([5]), banned_below_min_tokens=(EOS, 5)
    )
    assert all(len(tokens) > 4 and not {EOS, 5} & set(tokens[:4]) for tokens, _ in found(held))
