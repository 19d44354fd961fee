"""Several sequences of one request: one computes the prompt, the others share its blocks and copy what they change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jserve.scheduler import PreemptionSettings, SequenceState
from tests.support.host_engine import HostEngine, expected_output, group, output, sequence


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + 7 * i) % 1000 for i in range(length)]


def check(one, count: int) -> None:
    assert output(one) == expected_output(one.tokens[: one.num_prompt].tolist(), count, one.index)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 17])
def test_the_prompt_is_computed_once_and_each_sample_has_its_own_tokens(length, prefix_cache, overlap):
    engine = HostEngine(overlap=overlap, prefix_cache=prefix_cache)
    four = group("a", prompt(length), 6, 4)
    engine.add_group(four)
    engine.run()
    for one in four:
        check(one, 6)
    num_computed = sum(plan.num_tokens for plan in engine.plans)
    outputs = 4 * 5 + overlap * 4  # tokens fed back; with overlap a step too many, whose rows are dropped
    assert num_computed <= length + 3 + outputs
    assert engine.blocks.num_used_blocks == 0


def test_only_the_partial_last_block_is_copied():
    engine = HostEngine(num_blocks=64)
    engine.add_group(group("a", prompt(18), 3, 4))  # forked at 17 tokens: 4 full blocks and one of one token
    while engine.scheduler.num_running < 4:
        engine.step()
    assert engine.blocks.num_saved_blocks == 3 * 4
    assert engine.blocks.stats.num_copied_blocks == 3  # the last owner keeps the original
    engine.run()


def test_newcomers_enter_while_siblings_wait_for_the_prompt():
    engine = HostEngine(budget=16)
    engine.add_group(group("a", prompt(20), 4, 3))
    other = sequence("b", prompt(5, 3), 4)
    engine.add(other)
    engine.step()
    engine.step()
    assert other.state is SequenceState.RUNNING and engine.scheduler.num_waiting == 2
    engine.run()


@pytest.mark.parametrize("when", range(1, 8))
@pytest.mark.parametrize("who", range(3))
@pytest.mark.parametrize("overlap", [False, True])
def test_an_abort_of_one_leaves_the_others(who, when, overlap):
    engine = HostEngine(budget=8, overlap=overlap)
    three = group("a", prompt(18), 5, 3)
    engine.add_group(three)
    for _ in range(when):
        engine.step()
    engine.abort(three[who])
    engine.run()
    for one in three:
        if one is not three[who]:
            check(one, 5)
    assert engine.blocks.num_used_blocks == 0 and engine.scheduler.num_waiting == 0


def test_a_leader_that_ends_with_its_first_token_leaves_the_prompt_to_the_others():
    engine = HostEngine()
    first = expected_output(prompt(9), 1)[0]
    three = group("a", prompt(9), 5, 3, stop_token_ids=frozenset([first]))
    engine.add_group(three)
    engine.run()
    assert output(three[0]) == [first]
    for one in three[1:]:
        check(one, 5)


def test_more_samples_than_slots_run_in_turn():
    engine = HostEngine(max_num_seqs=3)
    many = group("a", prompt(6), 4, 10)
    engine.add_group(many)
    engine.run()
    for one in many:
        check(one, 4)


def test_a_group_is_preempted_as_one_by_another_request():
    engine = HostEngine(num_blocks=14, budget=16)  # 13 usable blocks of 4
    engine.add(sequence("old", prompt(4), 30))
    engine.step()
    three = group("new", prompt(10, 3), 20, 3)
    engine.add_group(three)
    seen = set()
    while engine.scheduler.has_work or engine.in_flight:
        engine.step()
        running = [one.state is SequenceState.RUNNING for one in three if not one.finished]
        if three[0].num_preemptions:
            seen.add(tuple(running))
    assert engine.scheduler.num_preemptions >= 3
    assert any(not any(states) for states in seen)
    for one in three:
        check(one, 20)


REQUEST = st.tuples(
    st.integers(1, 30),  # prompt tokens
    st.integers(1, 12),  # max_tokens
    st.integers(1, 5),  # n
    st.integers(0, 20),  # arrives before this step
    st.one_of(st.none(), st.tuples(st.integers(0, 30), st.integers(0, 4))),  # abort (step, index)
)
ENGINE = st.fixed_dictionaries(
    dict(
        num_blocks=st.integers(14, 60), budget=st.integers(1, 40), max_num_seqs=st.integers(1, 7),
        overlap=st.booleans(), prefix_cache=st.booleans(),
        preemption=st.sampled_from([PreemptionSettings("recompute"), PreemptionSettings("swap")]),
        num_host_blocks=st.sampled_from([2, 8, 60]),
    )
)


@settings(max_examples=100, deadline=None)
@given(st.lists(REQUEST, min_size=1, max_size=6), ENGINE, st.integers(0, 9))
def test_whatever_happens_each_sample_is_right(requests, shape, forced):
    engine = HostEngine(**shape, checks_kv=True)
    groups = [
        group(str(number), prompt(length, number % 2), most, count)
        for number, (length, most, count, _, _) in enumerate(requests)
    ]
    aborted = set()
    for step in range(2000):
        for (_, _, _, arrives, _), one in zip(requests, groups):
            if arrives == step:
                engine.add_group(one)
        for (_, _, count, arrives, abort), one in zip(requests, groups):
            if abort is not None and abort[0] + arrives == step:
                target = one[abort[1] % count]
                aborted.add(target)
                engine.abort(target)
        if forced and step < 60 and step % 10 == forced and (running := engine.scheduler.running()):
            engine.scheduler._preempt(running[-1])
        if engine.scheduler.has_work or engine.in_flight:
            engine.step()
        elif step > 60:
            break
    for (_, most, _, _, _), members in zip(requests, groups):
        for one in members:
            assert one.finished
            if one not in aborted:
                check(one, most)
    assert engine.scheduler.num_waiting == 0 and engine.blocks.num_used_blocks == 0
    assert np.all(engine.blocks.tables[0] == 0)
    engine.scheduler._seating.release_returned()
    assert engine.blocks._swap.pools[0].num_used == 0 and not engine.scheduler._seating._away
