"""Chi-square of drawn tokens against the distribution that temperature, top_k, top_p, min_p, penalties and bias define.

Seeds are fixed, so each test passes or fails for good; a wrong distribution of this kind is off by thousands.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy import stats

from tests.sampling import reference
from tests.sampling.reference import Row
from tests.support.sampler_rows import SAMPLE, run

V = 1000
NUM_DRAWS = 64 * 64


def draws(logits: np.ndarray, row: Row, variant) -> np.ndarray:
    """NUM_DRAWS tokens of one request's row, at consecutive positions and streams."""
    rows = [dataclasses.replace(row, position=i // 2, sample_index=i % 2) for i in range(NUM_DRAWS)]
    repeated = np.broadcast_to(logits, (64, V))
    return np.concatenate([run(repeated, rows[at : at + 64], variant).token_ids for at in range(0, NUM_DRAWS, 64)])


@pytest.mark.parametrize("row, variant", [
    (Row(), SAMPLE),
    (Row(temperature=0.5), SAMPLE),
    (Row(temperature=2.0), SAMPLE),
    (Row(top_k=10), SAMPLE),
    (Row(top_k=200, temperature=3.0), SAMPLE),
    (Row(top_p=0.7), SAMPLE),
    (Row(top_p=0.95, temperature=2.0), SAMPLE),
    (Row(min_p=0.05), SAMPLE),
    (Row(temperature=1.3, min_p=0.02, top_k=50, top_p=0.9), SAMPLE),
    (Row(repetition=1.5, presence=0.4, frequency=0.3, prompt=(1, 2, 3), output=(4, 4, 500)), SAMPLE),
    (Row(bias=((999, 6.0), (0, -2.0)), allowed=tuple(range(0, V, 3))), SAMPLE),
    (Row(temperature=0.7, word_ends=(1, 2, 3, 999), grammar=tuple(range(500)), top_p=0.95), SAMPLE),
], ids=str)
def test_drawn_tokens_follow_the_distribution(row, variant):
    rng = np.random.default_rng(4)
    logits = (rng.permutation(np.geomspace(1, 1e-4, V)) ** 0.25 * 8).astype(np.float32)
    row = dataclasses.replace(row, seed=2024)
    x = reference.process(logits, row, V)
    kept, _ = reference.keep(x, row)
    p = np.where(kept, reference.probabilities(x, row.temperature), 0.0)
    p /= p.sum()
    counts = np.bincount(draws(logits, row, variant), minlength=V)
    assert counts[p == 0].sum() == 0
    # Tokens too rare for a chi-square are pooled.
    often = p * NUM_DRAWS >= 5
    observed = np.append(counts[often], counts[~often].sum())
    expected = np.append(p[often], p[~often].sum()) * NUM_DRAWS
    observed, expected = observed[expected > 0], expected[expected > 0]
    assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-3


def test_the_next_token_does_not_depend_on_the_one_before():
    """Pairs of neighbouring positions of one seed fill a table of 4 x 4 evenly."""
    tokens = draws(np.zeros(V, np.float32), Row(seed=77), SAMPLE)[::2] * 4 // V
    table = np.zeros((4, 4))
    np.add.at(table, (tokens[:-1], tokens[1:]), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-3
    assert stats.chisquare(np.bincount(tokens, minlength=4)).pvalue > 1e-3
