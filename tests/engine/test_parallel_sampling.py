"""n and best_of on a real engine: right tokens, draws of their own, streams interleaved, one end each."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import pytest

from jserve.request import FinishReason
from jserve.weights.load import load_model
from tests.support.arrivals import force_preemptions
from tests.support.engines import answers, request, run, running_engine
from tests.support.tiny_models import naive_generate, random_gguf

# One set of programs for the whole file; the pool is small, so that requests get in each other's way.
SMALL = dict(
    kv={"num_blocks": 24, "memory_bytes": None, "block_size": 8},
    scheduler={"max_num_batched_tokens": 16, "max_num_seqs": 4},
)
PROMPT = [(7 * i) % 500 for i in range(37)]
DRAWN = dict(temperature=1.0, seed=11, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return random_gguf(tmp_path_factory.mktemp("model") / "model.gguf")


def engine_of(path, **sections):
    """SMALL, changed by `sections`."""
    merged = {name: {**SMALL.get(name, {}), **sections.get(name, {})} for name in SMALL | sections}
    return running_engine(path, **merged)


def outputs(update) -> list[list[int]]:
    return [delta.token_ids for delta in sorted(update.outputs, key=lambda delta: delta.index)]


@pytest.fixture(scope="module")
def alone(path):
    """Four samples of PROMPT, drawn with nothing else running."""
    with engine_of(path) as engine:
        [update] = answers(engine, [request(PROMPT, 9, n=4, **DRAWN)])
    return outputs(update)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_samples_differ_and_do_not_depend_on_what_else_runs(path, alone, prefix_cache, overlap):
    assert len({tuple(one) for one in alone}) == 4
    with engine_of(path, kv={"prefix_cache": prefix_cache}, scheduler={"overlap": overlap}) as engine:
        force_preemptions(engine)
        others = [request([3 + i, 4], 12, n=2, ignore_eos=True) for i in range(3)]
        got = answers(engine, [request(PROMPT, 9, n=4, **DRAWN), *others, request(PROMPT, 9, n=2, **DRAWN)])
        assert engine.loads().num_preemptions > 4
    assert outputs(got[0]) == alone and outputs(got[-1]) == alone[:2]


def test_greedy_samples_equal_the_naive_oracle(path):
    model = load_model(path, "float32")
    want = naive_generate(model.params, model.config, PROMPT, 8)
    with engine_of(path) as engine:
        [update] = answers(engine, [request(PROMPT, 8, n=3, ignore_eos=True)])
        copied = engine._scheduler.blocks.stats.num_copied_blocks
    assert outputs(update) == [want] * 3 and copied >= 2
    assert update.usage.completion_tokens == 24 and update.usage.prompt_tokens == len(PROMPT)


def test_streams_are_interleaved_and_a_stop_of_one_leaves_the_others(path, alone):
    stop = next(token for token in alone[1] if sum(token in one for one in alone) == 1)

    async def stream(engine):
        tokens, reasons, first, number = defaultdict(list), {}, {}, 0
        async for update in engine.generate(request(PROMPT, 9, n=4, stop_token_ids=(stop,), **DRAWN)):
            number += 1
            for delta in update.outputs:
                tokens[delta.index] += delta.token_ids
                if delta.token_ids:
                    first.setdefault(delta.index, number)
                if delta.finish_reason:
                    assert delta.index not in reasons
                    reasons[delta.index] = delta.finish_reason
                    if not delta.index:
                        last = number
        return tokens, reasons, first, last

    with engine_of(path) as engine:
        tokens, reasons, first, last = run(stream(engine))
    at = alone[1].index(stop) + 1
    assert [tokens[index] for index in range(4)] == [alone[0], alone[1][:at], alone[2], alone[3]]
    assert reasons == {0: FinishReason.LENGTH, 1: FinishReason.STOP, 2: FinishReason.LENGTH, 3: FinishReason.LENGTH}
    assert max(first.values()) <= last, "not one output after the other (a late reader gets several tokens in a message)"


def test_best_of_sends_the_most_probable_at_the_end(path, alone):
    with engine_of(path) as engine:
        [every] = answers(engine, [request(PROMPT, 9, n=4, **DRAWN)])

        async def updates():
            return [update async for update in engine.generate(request(PROMPT, 9, n=2, best_of=4, **DRAWN))]

        [update] = run(updates())
    ranked = sorted(every.outputs, key=lambda delta: -delta.cumulative_logprob / len(delta.token_ids))
    assert [delta.index for delta in update.outputs] == [0, 1]
    assert [delta.token_ids for delta in update.outputs] == [delta.token_ids for delta in ranked[:2]]
    assert update.usage.completion_tokens == 4 * 9, "what was generated, sent or not"


def test_logprobs_and_prompt_logprobs_of_each_sample(path, alone):
    with engine_of(path) as engine:
        [update] = answers(engine, [request(PROMPT, 9, n=3, logprobs=2, prompt_logprobs=1, **DRAWN)])
    assert outputs(update) == alone[:3]
    assert len(update.prompt_logprobs) == len(PROMPT) and update.prompt_logprobs[0] is None
    for delta in update.outputs:
        assert [entry.chosen.token_id for entry in delta.logprobs] == delta.token_ids


def test_an_abort_at_any_time_leaves_nothing_behind(path):
    async def cancelled(engine, after: int):
        updates, seen = engine.generate(request(PROMPT, 30, n=5, **DRAWN)), 0
        if after == 0:
            task = asyncio.ensure_future(updates.__anext__())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            async for _ in updates:
                seen += 1
                if seen == after:
                    break
        await updates.aclose()

    async def work(engine):
        await asyncio.gather(*(cancelled(engine, after) for after in (0, 1, 2, 3, 7)))
        while engine.loads().requests_aborted < 5:
            await asyncio.sleep(0.02)
        assert await engine.check_integrity() == []

    with engine_of(path) as engine:
        run(work(engine))
