"""Fields that ask for more than one output, or choose among several: n, best_of and beams."""

from __future__ import annotations

import pytest

from jserve.request import EarlyStopping
from tests.support.conformance import PROMPT, conforms, ids, only

pytestmark = pytest.mark.xdist_group("conformance")

DRAWN = {"temperature": 1.0, "seed": 11, "max_tokens": 8, "ignore_eos": True}


def mean_logprob(output) -> float:
    return output.cumulative_logprob / len(output.token_ids)


@conforms("n")
def test_n(ask):
    """Each output draws from a stream of its own; the first one's is that of n = 1."""
    outputs = ask(**DRAWN, n=3).outputs
    assert [output.index for output in outputs] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in outputs}) == 3
    assert outputs[0].token_ids == ids(ask(**DRAWN))


@conforms("best_of")
def test_best_of(ask):
    ranked = sorted(map(mean_logprob, ask(**DRAWN, n=4).outputs), reverse=True)
    best = ask(**DRAWN, n=2, best_of=4).outputs
    assert [mean_logprob(output) for output in best] == pytest.approx(ranked[:2], abs=1e-4)


@pytest.fixture
def beams(ask):
    """Beam search over gRPC."""
    return lambda **params: ask(PROMPT, temperature=None, **{"max_tokens": 8, **params})


@conforms("beam_width")
def test_beam_width(beams, ask):
    outputs = beams(beam_width=4, n=4).outputs
    scores = [mean_logprob(output) for output in outputs]
    assert len({tuple(output.token_ids) for output in outputs}) == 4 and scores == sorted(scores, reverse=True)
    assert scores[0] >= mean_logprob(only(ask(max_tokens=8))) - 1e-4


@conforms("length_penalty")
def test_length_penalty(beams):
    """Far below 0 short outputs win, far above 0 long ones do."""
    stops = dict(beam_width=4, n=1, stop=[" ", ".", ","], early_stopping=EarlyStopping.NEVER)
    lengths = [len(ids(beams(**stops, length_penalty=penalty))) for penalty in (-20.0, 20.0)]
    assert lengths[0] < lengths[1]


@conforms("early_stopping")
def test_early_stopping(beams):
    """FIRST ends with the first finished candidates, NEVER goes on while a longer one may win."""
    stops = dict(beam_width=2, n=1, stop=[" ", "."], length_penalty=20.0)
    first, never = (beams(**stops, early_stopping=kind) for kind in (EarlyStopping.FIRST, EarlyStopping.NEVER))
    assert len(ids(first)) <= len(ids(never)) and ids(first) != ids(never)
