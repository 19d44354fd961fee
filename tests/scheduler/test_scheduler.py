"""The scheduler over the stand-in runner: what enters a step, who yields, and that every output is exactly right."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jserve.request import FinishReason
from jserve.scheduler import PolicySettings, SequenceState
from jserve.scheduler.buckets import default_token_buckets
from tests.support.host_engine import HostEngine, expected_output, output, sequence


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + 7 * i) % 1000 for i in range(length)]


def check(one, num_tokens: int) -> None:
    assert output(one) == expected_output(one.tokens[: one.num_prompt].tolist(), num_tokens)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [1, 7, 16, 17])
def test_outputs_do_not_depend_on_budget_or_overlap(budget, overlap):
    engine = HostEngine(budget=budget, overlap=overlap)
    work = [sequence(str(i), prompt(3 + 5 * i, i), 6) for i in range(6)]
    engine.run(work)
    for one in work:
        check(one, 6)
        assert one.finish_reason is FinishReason.LENGTH
    assert engine.blocks.num_used_blocks == 0


def test_a_finished_sequence_is_replaced_in_the_very_next_step():
    engine = HostEngine(max_num_seqs=1)
    first, second = sequence("a", prompt(3), 2), sequence("b", prompt(3, 5), 2)
    engine.add(first, second)
    engine.step(), engine.step()
    assert first.finished and second.state is SequenceState.WAITING
    plan = engine.step()
    assert plan.sequences == [second]


def test_decodes_come_first_and_prefill_fills_what_is_left():
    engine = HostEngine(budget=16)
    engine.add(sequence("short", prompt(2), 10))
    engine.step()
    engine.add(sequence("long", prompt(40, 3), 4))
    plan = engine.step()
    assert plan.num_scheduled.tolist() == [1, 15] and plan.num_decodes == 1 and plan.bucket == 16


def test_a_running_decode_never_misses_a_step_because_of_a_prompt_that_does_not_fit_yet():
    engine = HostEngine(num_blocks=9, budget=16)  # 8 usable blocks of 4
    running = sequence("running", prompt(6), 18)
    engine.add(running)
    engine.step()
    engine.add(sequence("large", prompt(29, 3), 2), *(sequence(f"small {at}", prompt(3, at), 2) for at in range(5)))
    while not running.finished:
        plan = engine.step()
        assert running in plan.sequences
        assert len(plan.sequences) == 1, "strictly first come, first served: nobody overtakes the large prompt"
    engine.run()
    assert engine.blocks.num_used_blocks == 0


def test_the_victim_has_the_lowest_priority_and_arrived_last():
    engine = HostEngine(num_blocks=9, budget=16, prefix_cache=False)
    urgent = sequence("urgent", prompt(7, 1), 9, priority=-1)
    early = sequence("early", prompt(7, 2), 9)
    late = sequence("late", prompt(7, 3), 9)
    engine.run([late, early, urgent])  # arrival decides between equals: late came before early here
    assert urgent.num_preemptions == 0
    assert early.num_preemptions >= 1 >= late.num_preemptions
    for one in (urgent, early, late):
        check(one, 9)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_for_an_urgent_newcomer_the_least_urgent_one_yields_in_whatever_order_they_came(order):
    engine = HostEngine(num_blocks=14, budget=32, prefix_cache=False, policy=PolicySettings("priority"))
    running = {priority: sequence(f"{priority}", prompt(7, priority), 6, priority=priority) for priority in order}
    engine.add(*running.values())
    assert engine.step().num_rows == 4
    newcomer = sequence("new", prompt(7, 9), 6, priority=-1)  # two blocks and one of head-room each: one too many
    engine.add(newcomer)
    plan = engine.step()
    assert set(plan.sequences) == {running[0], running[1], running[2], newcomer}
    assert plan.num_tokens == plan.num_scheduled.sum() == 3 + 7
    engine.run()
    assert [running[priority].num_preemptions for priority in range(4)] == [0, 0, 0, 1]
    for one in (*running.values(), newcomer):
        check(one, 6)


@pytest.mark.parametrize("overlap", [False, True])
def test_whoever_came_first_the_lowest_priority_yields_and_the_others_run_on(overlap):
    for order in itertools.permutations(range(4)):
        engine = HostEngine(num_blocks=8, budget=32, overlap=overlap, prefix_cache=False)
        four = {priority: sequence(str(priority), prompt(3, priority), 5, priority=priority) for priority in order}
        engine.add(*four.values())
        engine.step()  # a block each; there are three more, and all four will want one in the same step
        assert engine.blocks.num_free_blocks == 3
        engine.add(urgent := sequence("urgent", prompt(4, 9), 2, priority=-1))
        while not any(one.num_preemptions for one in four.values()):
            plan = engine.step()
        assert [one.num_preemptions for one in (four[at] for at in range(4))] == [0, 0, 0, 1]
        assert plan.sequences == [four[at] for at in range(3)], "the victim is not in the step, the others all are"
        engine.run()
        for one in four.values():
            check(one, 5)
        check(urgent, 2)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_preempted_sequence_comes_back_before_newcomers_of_its_priority(overlap):
    engine = HostEngine(num_blocks=9, overlap=overlap, prefix_cache=False)
    pair = [sequence("a", prompt(14, 1), 10), sequence("b", prompt(10, 2), 10)]
    engine.add(*pair)
    while not pair[1].num_preemptions:
        engine.step()
    newcomer = sequence("new", prompt(2, 3), 2)
    engine.add(newcomer)
    while newcomer.state is SequenceState.WAITING:
        engine.step()
    assert pair[1].state is not SequenceState.WAITING
    engine.run()
    check(pair[0], 10), check(pair[1], 10), check(newcomer, 2)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_sequence_that_outgrows_the_pool_alone_ends_with_length(overlap):
    engine = HostEngine(num_blocks=3, overlap=overlap)  # 8 tokens
    one = sequence("one", prompt(5), 50)
    engine.run([one])
    assert one.finish_reason is FinishReason.LENGTH
    check(one, 4)  # 8 cells hold 5 + 3, and the last token needs none


@pytest.mark.parametrize("overlap", [False, True])
def test_sequences_that_together_outgrow_the_pool_all_end(overlap):
    engine = HostEngine(num_blocks=5, overlap=overlap, prefix_cache=False)
    work = [sequence(str(i), prompt(4, i), 40) for i in range(3)]
    engine.run(work)
    for one in work:
        check(one, one.num_output)
        assert one.finish_reason is FinishReason.LENGTH and one.num_output == 13  # 16 cells, 4 of the prompt


def test_head_room_keeps_recomputation_bounded():
    engine = HostEngine(num_blocks=17, budget=32, prefix_cache=False)
    work = [sequence(str(i), prompt(4, i), 12) for i in range(8)]
    engine.run(work)
    useful = sum(one.num_known for one in work)
    assert sum(plan.num_tokens for plan in engine.plans) < 3 * useful
    assert work[0].num_preemptions == 0


def test_a_pool_of_the_minimum_size_serves_everybody():
    engine = HostEngine(num_blocks=4, budget=8)
    work = [sequence(str(i), prompt(1 + i % 7, i), 1 + i % 5) for i in range(100)]
    engine.run(work)
    assert all(one.num_output == one.sampling.max_tokens for one in work)


def test_max_tokens_zero_computes_the_prompt_and_samples_nothing():
    engine = HostEngine(budget=4)
    one = sequence("one", prompt(10), 0, prompt_logprobs=1)
    engine.run([one])
    assert one.finish_reason is FinishReason.LENGTH and one.num_output == 0
    assert sum(plan.num_tokens for plan in engine.plans) == 10


def test_stop_ids_count_only_beyond_min_tokens():
    stop = expected_output(prompt(3), 6)
    engine = HostEngine()
    early = sequence("early", prompt(3), 20, stop_token_ids=frozenset([stop[1], stop[5]]))
    late = sequence("late", prompt(3), 20, stop_token_ids=frozenset([stop[1], stop[5]]), min_tokens=4)
    engine.run([early, late])
    assert output(early) == stop[:2] and early.matched_stop == stop[1]
    assert output(late) == stop and late.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("after_steps", range(8))
def test_an_abort_in_any_state_releases_everything_once(overlap, after_steps):
    engine = HostEngine(num_blocks=9, budget=4, overlap=overlap)
    victim, other = sequence("victim", prompt(11), 8), sequence("other", prompt(6, 4), 8)
    engine.add(victim, other)
    for _ in range(after_steps):
        engine.step()
    engine.abort(victim)
    engine.abort(victim)
    known = victim.num_known
    engine.run()
    assert victim.num_known == known and victim.finish_reason is FinishReason.ABORTED
    check(other, 8)
    assert engine.blocks.num_used_blocks == 0


def test_an_abort_between_a_step_and_its_results_ends_a_request_once():
    """Also of the step with which it ends by itself; a thousand orders of arrivals, aborts and steps."""
    for seed in range(1000):
        random = np.random.default_rng(seed)
        engine = HostEngine(num_blocks=10, budget=8, overlap=bool(seed % 2), max_num_seqs=3)
        lengths, counts = random.integers(1, 9, 5).tolist(), random.integers(1, 5, 5).tolist()
        work = [sequence(str(at), prompt(lengths[at], at % 2), counts[at]) for at in range(5)]
        coming, told = list(work), {}
        while coming or engine.scheduler.has_work or engine.in_flight:
            action = random.integers(3)
            if action == 0 and coming:
                engine.add(coming.pop())
            elif action == 1 and (alive := [one for one in work if not one.finished and one not in coming]):
                victim = alive[random.integers(len(alive))]
                engine.abort(victim)
                told[victim] = victim.num_known
            elif engine.scheduler.has_work or engine.in_flight:
                launch_then_maybe_abort(engine, random, told)
        for one in work:
            check(one, one.num_output)
            aborted = one in told
            assert one.finish_reason is (FinishReason.ABORTED if aborted else FinishReason.LENGTH)
            assert one.num_known == told[one] if aborted else one.num_output == one.sampling.max_tokens
        assert engine.blocks.num_used_blocks == engine.scheduler.num_waiting == engine.scheduler.num_running == 0


def launch_then_maybe_abort(engine: HostEngine, random: np.random.Generator, told: dict) -> None:
    """A turn of the loop, with aborts while its step is under way."""
    launch = engine.runner.launch

    def launch_and_abort(plan):
        forced = launch(plan)
        for one in plan.sequences:
            if random.random() < 0.2 and not one.finished:
                engine.abort(one)
                told[one] = one.num_known
        return forced

    engine.runner.launch = launch_and_abort
    try:
        engine.step()
    finally:
        engine.runner.launch = launch


@pytest.mark.parametrize("overlap", [False, True])
def test_64_cancelled_at_once_leave_room_for_8(overlap):
    engine = HostEngine(num_blocks=200, budget=64, max_num_seqs=32, overlap=overlap, checks_kv=True)
    many = [sequence(str(at), prompt(5 + at % 9, at), 30) for at in range(64)]
    engine.add(*many)
    while sum(one.num_output > 2 for one in many) < 20:
        engine.step()
    for one in many:
        engine.abort(one)
    assert engine.scheduler.num_running == engine.scheduler.num_waiting == engine.blocks.num_used_blocks == 0
    engine.run(eight := [sequence(f"late {at}", prompt(7, at), 6) for at in range(8)])
    for one in eight:
        check(one, 6)
    assert all(one.finish_reason is FinishReason.ABORTED for one in many)


def test_200_prompts_of_5_families_through_6_blocks_read_their_own_tokens():
    """Freed blocks are poisoned, and every step reads back what it attends to."""
    random = np.random.default_rng(1)
    engine = HostEngine(num_blocks=7, budget=8, checks_kv=True, overlap=True)
    families = random.integers(0, 1000, (5, 20))
    work = []
    for at in range(200):
        tokens = [*families[random.integers(5)][: random.integers(0, 19)].tolist(), int(random.integers(1000))]
        work.append(sequence(str(at), tokens, int(random.integers(1, 5))))
    engine.run(work)
    for one in work:
        check(one, one.sampling.max_tokens)
    assert sum(one.num_cached for one in work) > 0 and engine.blocks.stats.num_evicted_blocks > 0
    assert engine.blocks.num_free_blocks + engine.blocks.num_cached_blocks == 6


def test_a_shared_prefix_is_computed_once():
    engine = HostEngine(num_blocks=64, block_size=4, budget=64)
    first, second = sequence("a", prompt(21), 3), sequence("b", prompt(21) + [5, 6], 3)
    engine.run([first])
    engine.run([second])
    assert (first.num_cached, second.num_cached) == (0, 20)
    check(second, 3)


@pytest.mark.parametrize(("budget", "between"), [(512, 192), (2048, 768), (256, None)])
def test_a_size_between_a_quarter_and_a_half_of_a_large_budget_is_among_the_default_buckets(budget, between):
    sizes = default_token_buckets(budget)
    assert sizes == tuple(sorted(sizes)) and sizes[-1] == budget
    assert [size for size in sizes if budget // 4 < size < budget // 2] == ([between] if between else [])


def test_a_step_fills_the_bucket_below_rather_than_pad_a_large_one():
    engine = HostEngine(budget=64, num_blocks=99, step_cost_tokens=4)
    engine.add(sequence("one", prompt(36), 4))
    assert [engine.step().num_tokens for _ in range(2)] == [32, 4]


workload = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(-1, 1), st.integers(0, 30), st.booleans()),
    min_size=1, max_size=12,
)  # prompt length, max_tokens, priority, arrives before this step, is aborted


@settings(max_examples=150, deadline=None)
@given(
    workload, st.integers(6, 20), st.integers(1, 24), st.integers(1, 6), st.booleans(), st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_any_workload_ends_with_the_right_tokens_and_nothing_owned(
    requests, num_blocks, budget, max_num_seqs, overlap, prefix_cache, seed
):
    engine = HostEngine(
        num_blocks=num_blocks, budget=budget, max_num_seqs=max_num_seqs, overlap=overlap, prefix_cache=prefix_cache
    )
    random = np.random.default_rng(seed)
    waiting = [
        (arrival, sequence(str(i), prompt(length, i % 3), most, priority=priority), aborted)
        for i, (length, most, priority, arrival, aborted) in enumerate(requests)
    ]
    everything = [one for _, one, _ in waiting]
    for at in range(2000):
        for item in [item for item in waiting if item[0] <= at]:
            waiting.remove(item)
            engine.add(item[1])
        for one, aborted in [(one, request[4]) for one, request in zip(everything, requests)]:
            if aborted and one.num_known > one.num_prompt and random.random() < 0.3:
                engine.abort(one)
        before = sum(one.num_known for one in everything)
        if engine.step() is None and not waiting and not engine.scheduler.has_work:
            break
        assert sum(one.num_known for one in everything) >= before, "a token was lost"
    for one in everything:
        assert one.finished
        check(one, one.num_output)
        capacity = (num_blocks - 1) * 4
        if one.finish_reason is FinishReason.LENGTH:
            assert one.num_output == min(one.sampling.max_tokens, capacity - one.num_prompt + 1)
    assert engine.blocks.num_used_blocks == 0 and engine.scheduler.num_running == 0
