"""Beams over the stand-in runner: whatever happens to their blocks, the search sees what it would see alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jserve.engine.outputs import fail
from jserve.request import Code, EarlyStopping, FinishReason, RequestError
from jserve.runner.fake_runner import next_candidates, next_token
from jserve.sampling.beam_search import BeamSearch, Candidates
from jserve.scheduler import PreemptionSettings, SequenceState
from tests.support.host_engine import VOCAB_SIZE, HostEngine, beams, expected_output, group, output, sequence


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + 7 * i) % 1000 for i in range(length)]


def alone(tokens: list[int], params) -> list[tuple]:
    """The search without an engine: its beams as lists of tokens."""
    search, live = BeamSearch(params), [list(tokens)]
    while True:
        for number, one in enumerate(live):
            best = next_token(one[-1], len(one) - 1, VOCAB_SIZE)
            search.report(number, Candidates(*next_candidates(best, VOCAB_SIZE)))
        moves = search.advance()
        if not moves:
            return found(search)
        live = [[*live[move.parent], move.token_id] for move in moves]


def found(search: BeamSearch) -> list[tuple]:
    return [
        ([token.token_id for token in one.last.path()], round(one.score, 4), one.reason, one.matched_stop)
        for one in search.best()
    ]


STOPS = dict(stop_token_ids=frozenset(range(0, 1000, 9)), banned_below_min_tokens=(), eos_token_ids=frozenset([500, 501]))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("length", [1, 4, 5, 18])
@pytest.mark.parametrize("width", [2, 3, 6])
def test_the_engine_finds_the_beams_that_the_search_finds_alone(width, length, overlap):
    engine = HostEngine(overlap=overlap, checks_kv=True)
    members = beams("a", prompt(length), 9, width, **STOPS)
    other, two = sequence("b", prompt(7, 3), 12), group("c", prompt(5, 4), 8, 2)
    engine.add_group(members)
    engine.add(other)
    engine.add_group(two)
    engine.run()
    assert found(members[0].search) == alone(prompt(length), members[0].sampling)
    assert output(other) == expected_output(prompt(7, 3), 12)
    for one in two:
        assert output(one) == expected_output(prompt(5, 4), 8, one.index)
    assert engine.blocks.num_used_blocks == 0


def test_beams_decode_in_one_step_and_share_the_prompt():
    engine = HostEngine(num_blocks=64)
    members = beams("a", prompt(34), 6, 4)
    engine.add_group(members)
    while not any(plan.num_rows == 4 for plan in engine.plans):
        engine.step()
    assert engine.blocks.num_saved_blocks >= 3 * 8
    rows = [plan.num_rows for plan in engine.plans if plan.decode_only]
    engine.run()
    assert set(rows) == {4}


def test_beams_alone_in_too_small_a_pool_end_as_they_are():
    engine = HostEngine(num_blocks=10, checks_kv=True)  # 9 usable blocks of 4
    members = beams("a", prompt(8), 60, 3)
    engine.add_group(members)
    engine.run()
    best = found(members[0].search)
    assert len(best) == 3 and {reason for _, _, reason, _ in best} == {FinishReason.LENGTH}
    assert {len(tokens) for tokens, _, _, _ in best} != {60}
    assert engine.outgrown == [members[0]] and engine.blocks.num_used_blocks == 0


@pytest.mark.parametrize("num_steps", [0, 3])
def test_where_one_beam_fails_its_search_ends(num_steps):
    """Waiting or running: a step that breaks names sequences, and a search does not go on with fewer beams."""
    engine = HostEngine(checks_kv=True)
    members, other = beams("a", prompt(8), 9, 3), sequence("b", prompt(7, 3), 5)
    engine.add_group(members)
    engine.add(other)
    for _ in range(num_steps):
        engine.step()
    result = fail(engine.scheduler, [members[0]], RequestError(Code.INTERNAL, "broken"))
    assert [one for one, _ in result.failed] == members and all(one.finished for one in members)
    engine.run()
    assert output(other) == expected_output(prompt(7, 3), 5) and engine.blocks.num_used_blocks == 0


SEARCH = st.tuples(
    st.integers(1, 25),  # prompt tokens
    st.integers(1, 10),  # max_tokens
    st.integers(2, 5),  # beam_width
    st.sampled_from([0.0, 1.0, 2.0, -1.0]),
    st.sampled_from(EarlyStopping),
    st.booleans(),  # ends by stop ids
    st.integers(0, 15),  # arrives before this step
    st.one_of(st.none(), st.integers(0, 25)),  # abort
)
ENGINE = st.fixed_dictionaries(
    dict(
        num_blocks=st.integers(26, 70), budget=st.integers(5, 40), max_num_seqs=st.integers(5, 9),
        overlap=st.booleans(), prefix_cache=st.booleans(),
        preemption=st.sampled_from([PreemptionSettings("recompute"), PreemptionSettings("swap")]),
        num_host_blocks=st.sampled_from([2, 12, 90]),
    )
)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(SEARCH, min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 10), st.integers(1, 3)), max_size=3),
    ENGINE,
    st.integers(0, 9),
)
def test_whatever_happens_the_search_finds_the_same(searches, others, shape, forced):
    engine = HostEngine(**shape, checks_kv=True)
    groups = [
        beams(str(number), prompt(length, number % 2), most, width, length_penalty=penalty, early_stopping=rule,
              **(STOPS if stops else {}))
        for number, (length, most, width, penalty, rule, stops, _, _) in enumerate(searches)
    ]
    samples = [group(f"s{n}", prompt(length, n % 2), most, count) for n, (length, most, count) in enumerate(others)]
    for one in samples:
        engine.add_group(one)
    aborted = set()
    for step in range(3000):
        for search, members in zip(searches, groups):
            if search[6] == step:
                engine.add_group(members)
            if search[7] is not None and search[6] + search[7] == step and not members[0].finished:
                aborted.add(members[0])
                for one in members:
                    engine.abort(one)
        if forced and step < 60 and step % 10 in (forced, (forced * 3) % 10) and (running := engine.scheduler.running()):
            engine.scheduler._preempt(running[-1])
        if engine.scheduler.has_work or engine.in_flight:
            engine.step()
        elif step > 60:
            break
    for members in groups:
        assert all(one.state is SequenceState.FINISHED for one in members)
        if members[0] not in aborted and members[0] not in engine.outgrown:
            assert found(members[0].search) == alone(members[0].tokens[: members[0].num_prompt].tolist(), members[0].sampling)
    for (length, most, _), members in zip(others, samples):
        for one in members:
            assert output(one) == expected_output(one.tokens[: one.num_prompt].tolist(), most, one.index)
    assert engine.scheduler.num_waiting == 0 and engine.blocks.num_used_blocks == 0
    engine.scheduler._seating.release_returned()
    assert engine.blocks._swap.pools[0].num_used == 0 and not engine.scheduler._seating._away
