"""Log-probabilities: raw, floored, ranked, with the chosen token among them; and prompt scores in chunks."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jserve.sampling.prompt_scores import score_positions
from jserve.sampling.scores import LOGPROB_FLOOR, largest
from tests.sampling import reference
from tests.sampling.reference import Row
from tests.support.sampler_rows import SAMPLE, SAMPLE_LOGPROBS, run

V = 1000


def logits_of(seed: int, num_rows: int = 16) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(num_rows, V)).astype(np.float32) * 4


def check_scores(out, chosen, logits, num_real=V):
    """Values, ranks and order of TokenScores, row by row, against the reference."""
    for row, x in enumerate(logits):
        wanted, order = reference.logprobs(x), reference.ranked(x, num_real)
        np.testing.assert_allclose(out.logprob[row], wanted[chosen[row]], atol=1e-4, rtol=1e-6)
        assert out.rank[row] == 1 + np.flatnonzero(order == chosen[row])[0]
        np.testing.assert_array_equal(out.top_ids[row], order[:20])
        np.testing.assert_allclose(out.top_logprobs[row], wanted[order[:20]], atol=1e-4, rtol=1e-6)
        # What a client sees for k: the chosen one and the k best, so k or k + 1 entries.
        for k in (0, 1, 20):
            entries = {int(chosen[row]), *map(int, out.top_ids[row][:k])}
            assert len(entries) == (k if out.rank[row] <= k else k + 1)


def test_the_chosen_token_and_the_best_are_those_of_the_raw_distribution():
    logits = logits_of(1)
    rows = [Row(temperature=2.0, seed=seed) for seed in range(16)]
    out = run(logits, rows, SAMPLE_LOGPROBS)
    check_scores(out.scores, out.token_ids, logits)
    assert (out.scores.rank > 20).any() and (out.scores.rank <= 20).any()
    np.testing.assert_array_equal(out.scores.logprob, out.logprob)


def test_logprobs_do_not_depend_on_temperature_filters_bans_or_bias():
    logits = logits_of(2)
    best = logits.argmax(1)
    plain = run(logits, [Row(temperature=0.0)] * 16, SAMPLE_LOGPROBS)
    unrelated = int(np.argmin(logits[0]))
    for row in (Row(temperature=0.1, top_k=1), Row(temperature=2.0, top_k=1), Row(top_p=1e-6), Row(min_p=1.0),
                Row(temperature=0.0, banned=(unrelated,))):
        out = run(logits, [row] * 16, SAMPLE_LOGPROBS)
        np.testing.assert_array_equal(out.token_ids, best)
        jax.tree.map(np.testing.assert_array_equal, out.scores, plain.scores)
    out = run(logits, [Row(temperature=0.0, bias=((unrelated, 5.0),), repetition=1.0)] * 16, SAMPLE)
    np.testing.assert_array_equal(out.logprob, plain.logprob)


def test_a_masked_token_keeps_its_raw_logprob_and_minus_infinity_becomes_the_floor():
    logits = logits_of(3, 2)
    logits[1, 10:] = -np.inf
    out = run(logits, [Row(top_k=1), Row(top_k=1)], SAMPLE_LOGPROBS)
    assert out.scores.top_logprobs.min() == LOGPROB_FLOOR and (out.scores.top_logprobs <= 0).all()
    assert (out.scores.top_logprobs[1] == LOGPROB_FLOOR).sum() == 10
    assert np.isfinite(out.scores.top_logprobs).all() and np.isfinite(out.logprob).all()


def test_probabilities_sum_to_one_at_any_scale():
    for scale in (0, 1e-3, 1, 100, 1e30):
        logits = logits_of(4) * np.float32(scale)
        targets = np.arange(16, dtype=np.int32)
        scored = [np.asarray(jax.jit(score_positions)(np.roll(logits, -shift, axis=1), targets).logprob)
                  for shift in range(0, V, 1)] if scale == 1 else None
        if scored is not None:
            np.testing.assert_allclose(np.exp(np.array(scored, np.float64)).sum(0), 1, atol=1e-4)
        out = jax.jit(score_positions)(logits, targets)
        assert np.isfinite(out.logprob).all() and (np.asarray(out.logprob) <= 0).all()


@pytest.mark.parametrize("num_real", [V, 950])
def test_prompt_scores_equal_the_reference_and_ties_rank_by_id(num_real):
    logits = np.round(logits_of(5))
    logits[0] = 0
    logits[1, ::2] = -0.0
    logits[2] = np.where(np.arange(V) % 7, -np.inf, 1.0)
    targets = np.random.default_rng(5).integers(0, num_real, 16).astype(np.int32)
    score = jax.jit(lambda logits, targets: score_positions(logits, targets, num_real))
    out = jax.tree.map(np.asarray, score(logits, targets))
    check_scores(out, targets, logits, num_real)


def test_prompt_scores_do_not_depend_on_the_other_positions_of_the_chunk():
    logits, targets = logits_of(6), np.arange(16, dtype=np.int32)
    score = jax.jit(score_positions)
    whole = jax.tree.map(np.asarray, score(logits, targets))
    other = logits.copy()
    other[1::2] = np.nan
    half = jax.tree.map(np.asarray, score(other, targets))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[::2], b[::2]), whole, half)


def test_prompt_scores_use_no_memory_beyond_the_chunk():
    """A chunk of 64 positions of a 128k vocabulary: temporaries stay under three chunks of logits."""
    shapes = jax.ShapeDtypeStruct((64, 128256), np.float32), jax.ShapeDtypeStruct((64,), np.int32)
    compiled = jax.jit(score_positions).lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * 64 * 128256 * 4


@pytest.mark.parametrize("width, count, chunk_size", [(40, 20, 32), (2000, 20, 32), (5000, 20, 128), (5001, 64, 32)])
def test_the_largest_are_found_with_ties_in_the_order_of_ids(width, count, chunk_size):
    rng = np.random.default_rng(width)
    rows = np.round(rng.normal(size=(8, width)) * 2).astype(np.float32)
    rows[0] = -np.inf
    rows[1] = np.arange(width)
    rows[2] = -np.arange(width)
    values, ids = jax.jit(largest, static_argnums=(1, 2))(rows, count, chunk_size)
    wanted = np.argsort(-rows, axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(ids, wanted)
    np.testing.assert_array_equal(values, np.take_along_axis(rows, wanted, axis=1))


def test_a_vocabulary_smaller_than_the_top_list():
    logits = logits_of(7)[:, :12]
    out = run(logits, [Row(temperature=0.0)] * 16, SAMPLE_LOGPROBS, num_real_tokens=11)
    assert out.scores.top_ids.shape == (16, 11)
    np.testing.assert_array_equal(out.scores.top_ids[0], reference.ranked(logits[0], 11))


def test_no_logprobs_no_lists():
    assert run(logits_of(8), [Row()] * 16, SAMPLE).scores is None
