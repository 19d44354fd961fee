"""Requests that come together compute their common beginning once."""

from __future__ import annotations

import gc

import pytest

from jserve.scheduler import Sequence, SequenceState
from tests.scheduler.test_beams import STOPS
from tests.support.host_engine import HostEngine, beams, expected_output, group, output, sequence

SHARED = [(3 + 7 * i) % 1000 for i in range(40)]


def family(count: int) -> list:
    return [sequence(f"f{number}", [*SHARED, 900 + number, 5], 4) for number in range(count)]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prefix_that_is_being_computed_is_waited_for(overlap):
    engine = HostEngine(budget=16, overlap=overlap, checks_kv=True)
    five = family(5)
    engine.run(five)
    for one in five:
        assert output(one) == expected_output(one.tokens[:42].tolist(), 4)
    assert [one.num_cached for one in five] == [0, 40, 40, 40, 40]
    prompt_tokens = sum(plan.num_tokens for plan in engine.plans) - 5 * 3
    assert prompt_tokens == 42 + 4 * 2


def test_others_go_on_meanwhile_and_no_slot_is_held():
    engine = HostEngine(budget=16)
    engine.add(*family(3), other := sequence("o", [1, 2, 3], 4))
    engine.step(), engine.step(), engine.step()
    assert other.state is SequenceState.RUNNING and engine.scheduler.num_running == 2
    assert engine.scheduler.num_waiting == 2
    engine.run()


def test_who_waits_goes_on_when_the_other_is_gone():
    engine = HostEngine(budget=8)
    first, second = family(2)
    engine.add(first, second)
    engine.step(), engine.step()
    assert second.state is SequenceState.WAITING
    engine.abort(first)
    engine.run()
    assert output(second) == expected_output(second.tokens[:42].tolist(), 4) and second.num_cached == 16


def test_who_waits_can_be_aborted():
    engine = HostEngine(budget=8)
    first, second = family(2)
    engine.add(first, second)
    engine.step()
    engine.abort(second)
    assert engine.scheduler.num_waiting == 0
    engine.run()
    assert first.finished and engine.blocks.num_used_blocks == 0


def test_a_finished_sequence_is_not_kept():
    engine = HostEngine(budget=16, overlap=True)
    for number in range(40):  # beginnings that nobody asks for again
        engine.run([sequence(f"kept{number}", [(number * 41 + 7 * i) % 1000 for i in range(40)], 2)])
    engine.plans.clear()
    gc.collect()
    kept = [one for one in gc.get_objects() if isinstance(one, Sequence) and one.request_id.startswith("kept")]
    assert len(kept) <= 1


@pytest.mark.parametrize("num_output", [5, 9, 12])
def test_preempted_beams_of_a_short_prompt_are_not_kept_either(num_output):
    """Their first block is output, of which a beam may change its mind."""
    engine = HostEngine(budget=16, step_cost_tokens=1)
    members = beams("b", [1, 2, 3], 25, 5, **STOPS)
    engine.add_group(members)
    while engine.scheduler.has_work:
        engine.step()
        if members[0].num_output >= num_output and not members[0].num_preemptions:
            engine.scheduler._preempt(members[0])
    assert members[0].num_preemptions and not engine.scheduler.prefixes._computing


def test_who_leaves_while_waiting_keeps_nobody():
    engine = HostEngine(budget=16)
    first, second = family(2)
    engine.add(first, second)
    engine.step(), engine.step(), engine.step()
    assert engine.scheduler.prefixes.num_waiting == 1
    engine.abort(second)
    engine.abort(first)
    assert not engine.scheduler.prefixes._waiting and not engine.scheduler.prefixes._computing


def test_nobody_waits_across_salts_with_bypass_or_without_a_cache():
    for changes, engine in (
        ({"salt": b"x"}, HostEngine(budget=64)), ({"use_prefix_cache": False}, HostEngine(budget=64)),
        ({}, HostEngine(budget=64, prefix_cache=False)),
    ):
        first, second = family(2)
        for name, value in changes.items():
            setattr(second, name, value)
        engine.add(first, second)
        engine.step(), engine.step()
        assert second.state is SequenceState.RUNNING and second.num_cached == 0
        engine.run()


def test_samples_and_beams_wait_too():
    engine = HostEngine(budget=16, checks_kv=True, max_num_seqs=8)
    [first] = family(1)
    engine.add(first)
    engine.add_group(three := group("g", [*SHARED, 7], 5, 3))
    engine.add_group(two := beams("b", [*SHARED, 8], 4, 2))
    engine.run()
    assert three[0].num_cached == two[0].num_cached == 40
    for one in three:
        assert output(one) == expected_output([*SHARED, 7], 5, one.index)


def test_the_source_documents_prompt_of_2010_shared_and_200_own_tokens():
    engine = HostEngine(num_blocks=400, block_size=16, budget=512)
    shared = [number % 991 for number in range(2010)]
    engine.run([sequence("cold", [*shared, *range(1, 201)], 1)])
    before = sum(plan.num_tokens for plan in engine.plans)
    engine.run([warm := sequence("warm", [*shared, *range(301, 501)], 1)])
    assert (warm.num_cached, sum(plan.num_tokens for plan in engine.plans) - before) == (2000, 210)
