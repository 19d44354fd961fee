"""Forced tokens in the scheduler: the tokens are those of one a step, whatever is preempted, shared, swapped or ends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jserve.request import FinishReason
from jserve.scheduler import PreemptionSettings
from tests.support.host_engine import HostEngine, expected_output, group, output, sequence

REQUEST = st.tuples(
    st.integers(1, 30),  # prompt tokens
    st.integers(1, 40),  # max_tokens
    st.sampled_from([1, 1, 3]),  # outputs
    st.booleans(),  # has an end-of-sequence token
)
ENGINE = st.fixed_dictionaries(
    dict(
        num_blocks=st.integers(16, 60), budget=st.integers(2, 40), max_num_seqs=st.integers(1, 7), overlap=st.booleans(),
        prefix_cache=st.booleans(), num_host_blocks=st.sampled_from([None, 12]),
        windows=st.sampled_from([(None,), (None, 9)]), preemption=st.sampled_from(["recompute", "swap"]),
    )
)


@settings(max_examples=150, deadline=None)
@given(st.lists(REQUEST, min_size=1, max_size=10), ENGINE)
def test_tokens_are_those_of_one_a_step(requests, shape):
    shape = shape | {"preemption": PreemptionSettings(shape["preemption"])}
    engine = HostEngine(**shape, checks_kv=True, jumps=True)
    everything = []
    for number, (length, most, count, has_end) in enumerate(requests):
        prompt = [(number % 3 + 7 * i) % 1000 for i in range(length)]
        ends = frozenset(range(0, 1000, 30)) if has_end else frozenset()
        one = group(str(number), prompt, most, count, eos_token_ids=ends)
        if engine.scheduler.fits(length):
            engine.add_group(one)
            everything += one
    engine.run()
    for one in everything:
        prompt = one.tokens[: one.num_prompt].tolist()
        expected = expected_output(prompt, one.limit - one.num_prompt, one.index)
        at = next((at for at, token_id in enumerate(expected, 1) if token_id in one.stop_ids), None)
        got = output(one)
        if one.finish_reason is FinishReason.STOP:
            assert got == expected[:at]
        else:
            assert got == expected[: len(got)] and not one.stop_ids.intersection(got)
            assert one in engine.outgrown or len(got) == one.limit - one.num_prompt


@pytest.mark.parametrize("overlap", [False, True])
def test_a_chunk_takes_the_place_of_many_steps(overlap):
    steps = {}
    for jumps in (False, True):
        engine = HostEngine(overlap=overlap, jumps=jumps, budget=64)
        one = sequence("0", [3], 60)
        engine.run([one])
        assert output(one) == expected_output([3], 60)
        steps[jumps] = len(engine.plans)
    assert steps[True] < 0.7 * steps[False]
    assert sum(plan.num_tokens for plan in engine.plans) <= 60  # no position twice


def test_forced_tokens_go_before_a_long_prompt():
    engine = HostEngine(overlap=True, jumps=True, budget=16, num_blocks=200)
    first, prompt = sequence("0", [3], 60), np.arange(1, 301).tolist()
    engine.run([sequence("1", prompt, 2), first])
    by_step = [dict(zip(plan.sequences, plan.num_scheduled)) for plan in engine.plans]
    begun = next(at for at, rows in enumerate(by_step) if first in rows)
    ended = max(at for at, rows in enumerate(by_step) if first in rows)
    assert all(first in rows for rows in by_step[begun:ended])
