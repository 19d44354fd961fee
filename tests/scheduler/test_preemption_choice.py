"""kv.preemption = auto: recompute or swap, whichever takes less by what steps and copies have taken."""

from __future__ import annotations

import pytest

from jserve.scheduler import PreemptionSettings
from jserve.scheduler.step_time import StepTimeModel


def speed_of(seconds_per_token: float) -> StepTimeModel:
    model = StepTimeModel(fits=False)
    model._mixed_tokens, model._mixed_seconds = 1000.0, 1000 * seconds_per_token
    return model


@pytest.mark.parametrize(("block_s", "token_s", "swaps"), [(1e-4, 1e-3, True), (1e-2, 1e-3, False)])
def test_what_takes_less_is_chosen(block_s, token_s, swaps):
    auto = PreemptionSettings("auto", block_s)
    assert auto.prefers_swap(num_tokens=64, num_blocks=16, step_time=speed_of(token_s)) is swaps
    assert PreemptionSettings("swap", block_s).prefers_swap(64, 16, speed_of(token_s))
    assert not PreemptionSettings("recompute", block_s).prefers_swap(64, 16, speed_of(token_s))


def test_two_copies_of_each_block_are_weighed_against_computing():
    auto, step_time = PreemptionSettings("auto", 1e-3), speed_of(1e-3)
    least = step_time.first_token_s(64) / 2e-3  # blocks whose two copies take as long
    assert auto.prefers_swap(64, int(least) - 1, step_time) and not auto.prefers_swap(64, int(least) + 1, step_time)


def test_before_any_step_was_measured_nothing_is_moved():
    assert not PreemptionSettings("auto", 1e-9).prefers_swap(64, 16, StepTimeModel(fits=False))
