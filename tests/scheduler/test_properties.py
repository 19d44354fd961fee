"""What must hold in every step, whatever comes: budget, decodes, order, progress, one end a request."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from jserve.engine.outputs import apply
from jserve.scheduler import POLICIES, PolicySettings, SequenceState
from tests.support.host_engine import HostEngine, sequence

REQUEST = st.tuples(
    st.integers(1, 40),  # prompt tokens
    st.integers(0, 14),  # max_tokens
    st.integers(-1, 1),  # priority
    st.integers(0, 25),  # arrives before this step
    st.sampled_from(["", "red", "blue"]),
)
ENGINE = st.fixed_dictionaries(
    dict(
        num_blocks=st.integers(12, 60), budget=st.integers(1, 40), max_num_seqs=st.integers(1, 7),
        overlap=st.booleans(), prefix_cache=st.booleans(),
    )
)


def prompt(length: int, first: int) -> list[int]:
    return [(first + 7 * i) % 1000 for i in range(length)]


@settings(max_examples=120, deadline=None)
@given(st.lists(REQUEST, min_size=1, max_size=14), ENGINE, st.sampled_from(POLICIES))
def test_invariants_of_every_step(requests, shape, policy):
    engine = HostEngine(**shape, policy=PolicySettings(policy, ageing_s=5.0))
    coming = []
    for number, (length, most, priority, arrives, tenant) in enumerate(requests):
        one = sequence(str(number), prompt(length, number % 3), most, priority=priority)
        one.arrival, one.tenant = float(arrives), tenant
        coming.append((arrives, one))
    everything = [one for _, one in coming]
    ends: Counter[str] = Counter()
    entered = []
    for now in range(3000):
        for item in [item for item in coming if item[0] <= now]:
            coming.remove(item)
            if engine.scheduler.fits(item[1].num_prompt):
                engine.scheduler.add(item[1])
        scheduler = engine.scheduler
        decoding = {
            one
            for one in scheduler.running()
            if scheduler._slots.num_tokens[one.slot] - scheduler._slots.num_computed[one.slot] == 1
            and (one.prompt_only or scheduler._slots.num_tokens[one.slot] < one.limit)
        }
        plan = scheduler.schedule()
        for one in scheduler.take_outgrown():
            ends[one.request_id] += 1
        if plan is not None:
            check_plan(engine, plan)
            still_running = {one for one in decoding if one.state is SequenceState.RUNNING}
            assert still_running <= set(plan.sequences), "a decode missed a step"
            entered += [one for one in plan.admitted if not one.num_preemptions]
            engine.in_flight.append(plan)
            engine.runner.launch(plan)
        if engine.in_flight and (plan is None or len(engine.in_flight) > int(engine.overlap)):
            result = apply(scheduler, engine.in_flight.popleft(), engine.runner.collect())
            for one, _ in result.ended:
                ends[one.request_id] += 1
        elif plan is None:
            assert not scheduler.has_work, "nothing runs, nothing is in flight, and work waits"
            if not coming:
                break
    accepted = [one for one in everything if one.num_prompt <= (engine.num_blocks - 1) * engine.block_size]
    assert ends == Counter({one.request_id: 1 for one in accepted})
    assert engine.blocks.check_integrity() == [] and engine.blocks.num_used_blocks == 0
    if policy == "fcfs" and engine.scheduler.prefixes.num_waits == 0:
        check_order(entered)


def check_plan(engine: HostEngine, plan) -> None:
    assert 0 < plan.num_tokens <= engine.budget and plan.num_tokens <= plan.bucket
    assert plan.num_tokens == plan.num_scheduled.sum() and (plan.num_scheduled > 0).all()
    assert len(set(plan.slots.tolist())) == plan.num_rows <= engine.scheduler.limits.num_slots
    assert (plan.num_scheduled[: plan.num_decodes] == 1).all()
    assert (plan.num_scheduled[plan.num_decodes :] > 1).all()
    limits = engine.scheduler.limits
    assert plan.bucket in (limits.sequence_buckets if plan.decode_only else limits.token_buckets)


def check_order(entered) -> None:
    """First come, first served within a class: of two that waited together, the earlier one entered first."""
    last = {}
    for one in entered:
        before = last.get(one.priority)
        assert before is None or (before.arrival, before.order) <= (one.arrival, one.order)
        last[one.priority] = one
