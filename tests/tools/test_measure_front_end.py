"""`tools/measure_front_end.py`: which share is lost, and what the table says; the measuring needs a quiet machine."""

from __future__ import annotations

import pytest

from tools.measure_front_end import render, summary


def side(rate: float, padded: float = 0.01) -> dict[str, float]:
    return {"output_throughput": rate, "median_ttft_ms": 900.4, "median_tpot_ms": 88.6, "padded_token_share": padded,
            "num_steps": 130}


def test_the_middle_round_says_what_the_front_end_takes():
    rounds = [{"offline": side(100.0), "served": side(rate)} for rate in (97.0, 80.0, 101.0)]
    answer = summary(rounds)
    assert answer["median_ratio"] == 0.97 and answer["lost_percent"] == pytest.approx(3)
    text = render(rounds, answer)
    assert "| 2 | 100.0 | 80.0 | 0.800 | 89, 89 | 900, 900 | 1.0%, 1.0% | 130, 130 |" in text
    assert text.endswith("the front end takes 3.0% of throughput: median ratio 0.970, from 0.800 to 1.010")
