"""Preemption of each kind, at any time, changes no token, log-probability, text or usage; only the counters tell."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from jserve.weights.load import load_model
from tests.engine.test_parallel_sampling import DRAWN, PROMPT, engine_of, outputs
from tests.support.arrivals import PreemptsAtEveryStep
from tests.support.engines import answers, request, run, token_ids, wait_idle
from tests.support.tiny_models import full_logits, random_gguf


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return random_gguf(tmp_path_factory.mktemp("model") / "model.gguf")


def work() -> list:
    shared = [(5 * i) % 499 for i in range(30)]
    prompts = [PROMPT, shared + [7], shared[:17], [9], shared + [8, 9, 10]]
    made = [request(prompt, 14, logprobs=2, ignore_eos=True, min_tokens=3) for prompt in prompts]
    made += [request(prompt, 11, n=3, **{**DRAWN, "seed": at}) for at, prompt in enumerate(prompts[:3])]
    penalties = dict(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3)
    made.append(request(shared + [11], 12, n=2, **DRAWN, **penalties))
    made.append(request(shared[:9], 12, n=2, temperature=1.0, seed=5, regex="[a-z]{6,9}"))
    return made


@pytest.fixture(scope="module")
def undisturbed(path):
    """Each request alone."""
    with engine_of(path) as engine:
        return [answers(engine, [one])[0] for one in work()]


def test_the_greedy_ones_of_them_are_those_of_the_naive_oracle(path, undisturbed):
    model = load_model(path, "float32")
    for one, alone in list(zip(work(), undisturbed))[:5]:
        ids = list(one.prompt_token_ids)
        for token_id in token_ids(alone):
            padded = ids + [0] * (64 - len(ids))  # causal: what follows changes nothing
            assert token_id == full_logits(model.params, model.config, padded)[len(ids) - 1].argmax()
            ids.append(token_id)


def preempt_every(engine, period: int, most: int = 1000) -> None:
    """Preempts the last running sequence after every few steps, whatever is in flight."""
    check, steps, times = engine._loop.on_step, itertools.count(1), itertools.count(1)

    def on_step(scheduler) -> None:
        if next(steps) % period == 0 and (running := scheduler.running()) and next(times) <= most:
            scheduler._preempt(running[-1])
        check(scheduler)

    engine._loop.on_step = on_step


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("period", [3, 4])
def test_nothing_but_the_counters_tells_of_it(path, undisturbed, kind, period, overlap):
    with engine_of(path, kv={"preemption": kind}, scheduler={"overlap": overlap}) as engine:
        preempt_every(engine, period)
        got = answers(engine, work())
        loads = engine.loads()
    assert loads.num_preemptions > 10
    if kind == "swap":
        assert loads.num_swap_preemptions > 10 and loads.swapped_out_bytes >= loads.swapped_in_bytes > 0
    if kind == "recompute":
        assert loads.num_swap_preemptions == loads.swapped_out_bytes == 0
    check_same(got, undisturbed)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", ["recompute", "swap"])
def test_nor_where_somebody_is_preempted_at_every_step(path, undisturbed, kind, overlap):
    with engine_of(path, kv={"preemption": kind}, scheduler={"overlap": overlap}) as engine:
        check, preempts = engine._loop.on_step, PreemptsAtEveryStep()

        def on_step(scheduler) -> None:
            preempts(scheduler)
            check(scheduler)

        engine._loop.on_step = on_step
        got = answers(engine, work())
        loads, num_steps = engine.loads(), engine._loop.totals.num_steps
    assert 2 * preempts.num_preempted > num_steps
    assert loads.num_preemptions >= preempts.num_preempted
    assert (loads.num_swap_preemptions > preempts.num_preempted // 2) == (kind == "swap")
    check_same(got, undisturbed)


def check_same(got, undisturbed) -> None:
    """Tokens, log-probabilities, text, usage and ends."""
    for one, alone in zip(got, undisturbed):
        assert outputs(one) == outputs(alone)
        assert one.usage.completion_tokens == alone.usage.completion_tokens
        assert one.usage.prompt_tokens == alone.usage.prompt_tokens
        for mine, other in zip(*(sorted(update.outputs, key=lambda delta: delta.index) for update in (one, alone))):
            assert mine.text == other.text and mine.finish_reason is other.finish_reason
            assert mine.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-4)
            if mine.logprobs is not None:
                assert [entry.chosen.token_id for entry in mine.logprobs] == mine.token_ids
                for left, right in zip(mine.logprobs, other.logprobs):
                    assert left.chosen.logprob == pytest.approx(right.chosen.logprob, abs=1e-5)


def test_a_host_budget_too_small_falls_back_to_recompute(path, undisturbed):
    with engine_of(path, kv={"preemption": "swap", "host_memory_bytes": 40_000}) as engine:
        preempt_every(engine, 3)
        got = answers(engine, work())
        loads = engine.loads()
    assert 0 < loads.num_swap_preemptions < loads.num_preemptions
    assert [outputs(one) for one in got] == [outputs(one) for one in undisturbed]


def test_aborts_in_every_state_leave_nothing_in_either_memory(path):
    async def cancelled(engine, one, after: int):
        updates, seen = engine.generate(one), 0
        async for _ in updates:
            seen += 1
            if seen == after:
                break
        await updates.aclose()

    with engine_of(path, kv={"preemption": "swap"}) as engine:
        preempt_every(engine, 3)

        async def everything():
            jobs = [cancelled(engine, one, after) for after, one in enumerate(work() * 2, 1)]
            await asyncio.gather(*jobs)

        run(everything())
        wait_idle(engine)
        assert engine.loads().num_swap_preemptions > 0
        engine._scheduler._seating.release_returned()
        assert [pool.num_used for pool in engine._scheduler.blocks._swap.pools] == [0]
