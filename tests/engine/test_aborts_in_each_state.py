"""An abort in each state a request can be in: the others' tokens are the naive oracle's, and nothing stays owned."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from jserve.request import FinishReason
from jserve.scheduler import PreemptionSettings, Scheduler, Sequence, SequenceState, tier_waits
from jserve.weights.load import load_model
from tests.engine.test_parallel_sampling import engine_of
from tests.support.engines import answers, num_ended, request, run, token_ids, wait_idle
from tests.support.tiny_models import full_logits, random_gguf

LONGEST = 160
TARGET = [(7 * i) % 500 for i in range(83)]  # ten blocks of 8; six steps of 16
OTHERS = [[(11 * i + 3) % 500 for i in range(20)], [5, 6, 7], TARGET[:40] + [1, 2]]
RUNNING, WAITING = SequenceState.RUNNING, SequenceState.WAITING

Seen = Callable[[Scheduler, list[Sequence]], bool]


def computed(scheduler: Scheduler, one: Sequence) -> int:
    return scheduler.blocks.num_computed(one.slot) if one.state is RUNNING else 0


def preempted(is_there: Seen) -> Seen:
    """Preempts the target once it decodes, and looks again after that."""

    def seen(scheduler: Scheduler, target: list[Sequence]) -> bool:
        if not any(one.num_preemptions for one in target):
            if target[0].state is RUNNING and target[0].num_output >= 2:
                scheduler._preempt(target[0])
            else:
                return False
        return is_there(scheduler, target)

    return seen


def fetching(scheduler: Scheduler, target: list[Sequence]) -> bool:
    return scheduler.tiers is not None and any(one in scheduler.tiers._fetches for one in target)


STATES: dict[str, tuple[dict, Seen]] = {
    "queued": ({}, lambda s, t: all(one in s.waiting() for one in t) and s.num_running > 0),
    "queued behind full slots": ({"crowd": 4}, lambda s, t: t[0].state is WAITING and s._slots.num_free == 0),
    "being prefilled": ({}, lambda s, t: 0 < computed(s, t[0]) < t[0].num_prompt and t[0].num_output == 0),
    "in its last prefill step": ({}, lambda s, t: t[0].num_output == 0 and computed(s, t[0]) > 64),
    "decoding": ({}, lambda s, t: t[0].state is RUNNING and t[0].num_output == 3),
    "at its last token": ({}, lambda s, t: t[0].num_known == t[0].limit - 1),
    "preempted": ({"kind": "recompute"}, preempted(lambda s, t: t[0].state is WAITING and t[0].away is None)),
    "preempted, its token still to come": (
        {"kind": "recompute", "overlap": True}, preempted(lambda s, t: t[0].awaits_token),
    ),
    "back from preemption": (
        {"kind": "recompute"}, preempted(lambda s, t: t[0].state is RUNNING and t[0].num_preemptions == 1),
    ),
    "swapped out": ({"kind": "swap"}, preempted(lambda s, t: t[0].away is not None)),
    "swapped in, its copies just planned": ({"kind": "swap"}, preempted(lambda s, t: bool(s._seating._returned))),
    "waiting for a prefix that somebody computes": (
        {"twin": True}, lambda s, t: any(t[0] in waiting for waiting in s.prefixes._waiting.values()),
    ),
    "waiting for a sibling's prompt": ({"n": 3, "overlap": True}, lambda s, t: bool(t[0].group.parked)),
    "forked": ({"n": 3}, lambda s, t: s.blocks.num_saved_blocks > 0 and all(one.num_output for one in t)),
    "forked and swapped out": (
        {"n": 3, "kind": "swap"}, preempted(lambda s, t: sum(one.away is not None for one in t) > 1),
    ),
    "beams": ({"beams": 3}, lambda s, t: len(t[0].group.live) == 3 and t[0].num_output == 3),
    "beams, preempted": (
        {"beams": 3, "kind": "recompute"}, preempted(lambda s, t: all(one.state is WAITING for one in t)),
    ),
    "beams that are to be forked again": (
        {"beams": 3, "kind": "recompute"}, preempted(lambda s, t: bool(t[0].group.forks)),
    ),
    "beams, swapped out": ({"beams": 3, "kind": "swap"}, preempted(lambda s, t: t[0].away is not None)),
    "waiting for host memory": ({"tier": "host"}, fetching),
    "samples that wait for host memory": ({"tier": "host", "n": 3}, fetching),
    "waiting for the disk": ({"tier": "disk"}, fetching),
    "beams that wait for the disk": ({"tier": "disk", "beams": 3}, fetching),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return random_gguf(tmp_path_factory.mktemp("model") / "model.gguf")


@pytest.fixture(scope="module")
def naive(path):
    model, known = load_model(path, "float32"), {}

    def continuation(prompt: list[int], count: int) -> list[int]:
        ids = known.setdefault(tuple(prompt), list(prompt))
        while len(ids) < len(prompt) + count:
            padded = ids + [0] * (LONGEST - len(ids))  # causal: what follows changes nothing
            ids.append(int(full_logits(model.params, model.config, padded)[len(ids) - 1].argmax()))
        return ids[len(prompt) : len(prompt) + count]

    return continuation


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no overlap"])
def engine(request, path, tmp_path_factory):  # noqa: F811
    """One for all states, as a server would be: nothing of one may be left for the next."""
    kv = {"disk_path": str(tmp_path_factory.mktemp("kv")), "poison_freed": True}
    with engine_of(path, kv=kv, scheduler={"overlap": request.param}) as made:
        yield made


@pytest.mark.parametrize("state", STATES)
def test_an_abort_leaves_the_others_as_they_are(engine, naive, state, monkeypatch):
    setting, seen = STATES[state]
    scheduler, loop = engine._scheduler, engine._loop
    if setting.get("overlap") and not engine.config.scheduler.overlap:
        pytest.skip("each step's results are there before the next step")
    scheduler.preemption = PreemptionSettings(setting.get("kind", "recompute"))
    monkeypatch.setattr(scheduler.prefixes, "_min_tokens", 8)
    bring_down(engine, setting.get("tier"), monkeypatch)
    loads, check = engine.loads(), loop.on_step
    target: list[Sequence] = []
    aborted: list[int] = []

    def on_step(scheduler: Scheduler) -> None:
        target.extend(loop._live.get("target", ()) if not target else ())
        if target and not aborted and not target[0].finished and seen(scheduler, target):
            aborted.append(max(one.num_output for one in target))
            loop._abort("target")
            loop._abort("target")  # twice is once
        check(scheduler)

    loop.on_step = on_step
    try:
        got, others = run(serve(engine, setting))
    finally:
        loop.on_step = check
    wait_idle(engine)
    assert aborted, "the state never was"
    assert [delta.finish_reason for delta in got.outputs] == [FinishReason.ABORTED] * len(target)
    if len(target) == 1:
        assert token_ids(got) == naive(TARGET, 12)[: aborted[0]]
    for prompt, update in zip(others_of(setting), others):
        assert token_ids(update) == naive(prompt, 10) and update.outputs[0].finish_reason is FinishReason.LENGTH
    after = engine.loads()
    assert after.requests_aborted == loads.requests_aborted + 1 and after.requests_accepted == num_ended(after)
    nothing_is_left(engine)
    [whole] = answers(engine, [request(TARGET, 12, ignore_eos=True)])  # of what it has left in the cache, if anything
    assert token_ids(whole) == naive(TARGET, 12)


def others_of(setting: dict) -> list[list[int]]:
    """Prompts of those who come before the target; few of them where it is to have slots for several."""
    if "twin" in setting:
        return [OTHERS[0], TARGET[:80] + [3]]
    crowd = [[9, 8, 7, number] for number in range(setting.get("crowd", 0))]
    return (OTHERS[:1] if "n" in setting else OTHERS) + crowd


async def serve(engine, setting: dict):
    """The target's last word, and those of the others."""
    params: dict = {"ignore_eos": True}
    if "n" in setting:
        params |= {"n": setting["n"], "temperature": 1.0, "seed": 3}
    if "beams" in setting:
        params |= {"beam_width": setting["beams"], "n": setting["beams"], "temperature": None}
    target = dataclasses.replace(request(TARGET, 12, **params), request_id="target")
    others = [request(prompt, 10, ignore_eos=True) for prompt in others_of(setting)]
    *answered, got = await asyncio.gather(*(engine.generate_all(one) for one in [*others, target]))
    return got, answered


def bring_down(engine, tier: str | None, monkeypatch) -> None:
    """TARGET is in that tier and in none above it; with no tier, nowhere."""
    run(engine.flush_cache())
    if tier is None:
        return
    monkeypatch.setattr(tier_waits, "LOADS_PER_STEP", 1)
    answers(engine, [request(TARGET, 1)])
    rounds = 1 if tier == "host" else 6
    for at in range(rounds):  # 23 blocks on the device, as many in host memory
        for place in range(3):
            other = [(13 * i + 31 * place + 97 * at + 1) % 500 for i in range(110)]
            answers(engine, [request(other, 1)])
    assert engine._scheduler.blocks.match(np.array(TARGET, np.int32)) == 0


def nothing_is_left(engine) -> None:
    scheduler = engine._scheduler
    seating = scheduler._seating
    engine._loop.call(seating.release_returned).result()
    assert engine._loop.call(scheduler.blocks.check_integrity).result() == []
    assert scheduler.num_waiting == scheduler.num_running == scheduler.blocks.num_used_blocks == 0
    assert not seating._away and not seating._carried and not seating.beams._with_forks
    assert not scheduler.tiers and not scheduler.prefixes._waiting and not scheduler.prefixes._computing
    assert all((owners == 0).all() for owners in scheduler.blocks._swap.owners)
    assert not engine._loop._live
