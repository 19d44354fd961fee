"""Layer groups with windows under the real scheduler: what is behind a window comes back, and nothing else does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jserve.request import FinishReason
from jserve.scheduler import PreemptionSettings
from tests.scheduler.test_beams import STOPS, alone, found
from tests.support.arrivals import PreemptsAtEveryStep
from tests.support.host_engine import HostEngine, beams, expected_output, group, output, sequence

SHAPES = {"all windows": (9,), "alternating": (None, 9), "two windows": (None, 5, 14)}


def prompt(length: int, family: int = 0) -> list[int]:
    return [(13 * family + 7 * i) % 1000 for i in range(length)]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("windows", SHAPES.values(), ids=SHAPES)
def test_a_window_group_stays_bounded_while_a_sequence_grows(windows, overlap):
    engine = HostEngine(num_blocks=64, windows=windows, overlap=overlap, budget=16, checks_kv=True)
    one = sequence("a", prompt(90), 100)
    engine.add(one)
    most = [0] * len(windows)
    while not one.finished:
        engine.step()
        most = [max(before, pool.num_used) for before, pool in zip(most, engine.blocks._memory.pools)]
    engine.run()
    assert output(one) == expected_output(prompt(90), 100)
    steps_in_flight = 2 if overlap else 1
    for window, count in zip(windows, most):
        if window is None:
            assert count >= 188 // 4
        else:
            assert count <= -(-(window - 1 + 16 * steps_in_flight + 1) // 4) + 1 < 16


def test_a_sequence_far_longer_than_the_pool_runs_to_its_end_where_all_layers_have_windows():
    engine = HostEngine(num_blocks=1 + 4, windows=(9,), max_tokens=400, budget=16, overlap=True, checks_kv=True)
    ones = [sequence(str(number), prompt(150, number), 100) for number in range(3)]
    engine.run(ones)
    for number, one in enumerate(ones):
        assert output(one) == expected_output(prompt(150, number), 100) and one.finish_reason is FinishReason.LENGTH
    assert not engine.outgrown


def test_the_full_group_bounds_a_sequence_where_there_is_one():
    engine = HostEngine(num_blocks=(11, 6), windows=(None, 9), max_tokens=400, budget=16, overlap=True, checks_kv=True)
    assert engine.scheduler.fits(40) and not engine.scheduler.fits(41)
    one = sequence("a", prompt(30), 50)
    engine.run([one])
    assert one.finish_reason is FinishReason.LENGTH and output(one) == expected_output(prompt(30), 11)


def test_hits_need_what_every_group_sees():
    engine = HostEngine(num_blocks=(64, 12), windows=(None, 9), max_tokens=400, budget=16, checks_kv=True)
    shared = prompt(40)
    first, second = sequence("a", shared + [1, 2, 3], 4), sequence("b", shared + [1, 5], 4)
    engine.run([first])
    engine.run([second])
    assert second.num_cached == 40
    engine.run([sequence("c", prompt(60, 5), 4)])  # takes all blocks of the small group
    third = sequence("d", shared + [9, 9], 4)
    engine.run([third])
    assert third.num_cached == 0, "the full group still has it all, the window group nothing"
    assert output(third) == expected_output(shared + [9, 9], 4)


def test_a_sibling_comes_too_late_to_fork():
    """Samples that get a slot when the first has moved on: the window behind the prompt is gone, it is computed again."""
    engine = HostEngine(num_blocks=64, windows=(None, 9), max_num_seqs=2, budget=16, checks_kv=True)
    members = group("a", prompt(22), 40, 3)
    engine.add_group(members)
    engine.run()
    for index, one in enumerate(members):
        assert output(one) == expected_output(prompt(22), 40, index)


WORK = st.tuples(
    st.integers(1, 45),  # prompt tokens
    st.integers(1, 25),  # max_tokens
    st.sampled_from([1, 1, 2, 3]),  # samples
    st.sampled_from([1, 1, 1, 2, 4]),  # beams
    st.booleans(),  # family
    st.integers(0, 20),  # arrives before this step
    st.one_of(st.none(), st.none(), st.integers(0, 25)),  # abort
)
ENGINE = st.fixed_dictionaries(
    dict(
        overlap=st.booleans(), prefix_cache=st.booleans(), budget=st.integers(4, 40), max_num_seqs=st.integers(4, 7),
        preemption=st.sampled_from([PreemptionSettings("recompute"), PreemptionSettings("swap")]),
        num_host_blocks=st.sampled_from([2, 12, 90]),
    )
)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(WORK, min_size=1, max_size=6),
    ENGINE,
    st.sampled_from(list(SHAPES.values())),
    st.integers(0, 30),
    st.integers(0, 12),
    st.integers(0, 9),
)
def test_whatever_happens_everyone_reads_their_own(work, shape, windows, spare_full, spare_window, forced):
    smallest = {None: 19, 5: 4, 9: 5, 14: 7}  # that hold the longest sequence
    num_blocks = tuple(
        smallest[window] + 1 + (spare_full if window is None else spare_window) for window in windows
    )
    engine = HostEngine(**shape, windows=windows, num_blocks=num_blocks, max_tokens=80, checks_kv=True)
    parties = []
    for number, (length, most, count, width, family, arrives, abort) in enumerate(work):
        name, tokens = str(number), prompt(length, int(family))
        members = beams(name, tokens, most, width, **STOPS) if width > 1 else group(name, tokens, most, count)
        parties.append((arrives, abort, members))
    aborted = set()
    for step in range(4000):
        for arrives, abort, members in parties:
            if arrives == step:
                engine.add_group(members)
            if abort is not None and arrives + abort == step and not all(one.finished for one in members):
                aborted.add(members[0])
                for one in members:
                    engine.abort(one)
        if forced and step < 60 and step % 10 in (forced, forced * 3 % 10) and (running := engine.scheduler.running()):
            engine.scheduler._preempt(running[-1])
        if engine.scheduler.has_work or engine.in_flight:
            engine.step()
        elif step > 50:
            break
    for (_, most, _, width, *_), (_, _, members) in zip(work, parties):
        assert all(one.finished for one in members)
        tokens = members[0].tokens[: members[0].num_prompt].tolist()
        if members[0] in aborted:
            continue
        if width > 1:
            if members[0] not in engine.outgrown:
                assert found(members[0].search) == alone(tokens, members[0].sampling)
        else:
            for one in members:
                assert output(one) == expected_output(tokens, most, one.index)
    assert not [one for one in engine.outgrown if one.search is None and one.group.search is None]
    assert engine.scheduler.num_waiting == 0 and engine.blocks.num_used_blocks == 0
    engine.scheduler._seating.release_returned()
    assert all(pool.num_used == 0 for pool in engine.blocks._swap.pools) and not engine.scheduler._seating._away


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("length", "width", "num_blocks"), [(3, 2, 6), (4, 3, 5), (8, 3, 6), (13, 2, 5)])
def test_who_enters_and_finds_no_block_for_the_next_token_yields_or_ends(length, width, num_blocks, overlap):
    """Beams that come back to a pool that holds just what they have: nobody else runs, and nothing is in flight."""
    engine = HostEngine(
        num_blocks=num_blocks, windows=(9,), max_tokens=80, overlap=overlap, budget=16, max_num_seqs=5,
        num_host_blocks=90, checks_kv=True, preemption=PreemptionSettings("swap"),
    )
    preempts = PreemptsAtEveryStep()
    members, other = beams("beams", prompt(length), 25, width), sequence("other", prompt(3, 1), 3)
    engine.add_group(members)
    engine.add(other)
    while engine.scheduler.has_work or engine.in_flight:
        engine.step()
        preempts(engine.scheduler)
    assert members[0] in engine.outgrown and output(other) == expected_output(prompt(3, 1), 3)
    assert {reason for _, _, reason, _ in found(members[0].search)} <= {FinishReason.LENGTH, FinishReason.STOP}


def test_who_waits_for_the_prefix_of_one_that_outgrows_the_pool_goes_on():
    """The one that computed it ends in the very turn in which nobody else runs."""
    engine = HostEngine(num_blocks=6, windows=(9,), max_tokens=80, budget=14, max_num_seqs=6, checks_kv=True)
    first, work = beams("beams", prompt(44), 12, 3), [sequence(str(at), prompt(40) + [at], 4) for at in range(3)]
    engine.add_group(first)
    engine.add(*work)
    engine.run()
    for at, one in enumerate(work):
        assert output(one) == expected_output(prompt(40) + [at], 4)
