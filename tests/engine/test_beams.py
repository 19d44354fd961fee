"""Beam search on a real engine: the beams of a slow search that computes every sequence whole, whatever else goes on."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from jserve.request import EarlyStopping, FinishReason, GenerateRequest, SamplingParams
from jserve.sampling.beam_search import BeamSearch, Candidates
from jserve.sampling.limits import ModelLimits
from jserve.sampling.validate import resolve
from jserve.weights.load import load_model
from tests.engine.test_parallel_sampling import DRAWN, PROMPT, engine_of, outputs
from tests.engine.test_preemption import preempt_every
from tests.support.engines import answers, request, run, wait_idle
from tests.support.tiny_models import full_logits, random_gguf

LONGEST = 64
LIMITS = ModelLimits(context_length=256, vocab_size=512, eos_token_ids=(510,))
SEARCHES = [
    dict(beam_width=4, max_tokens=12, n=4, stop_token_ids=tuple(range(0, 510, 11))),
    dict(beam_width=3, max_tokens=9, n=2, length_penalty=2.0, early_stopping=EarlyStopping.NEVER, logprobs=2),
    dict(beam_width=2, max_tokens=10, n=2, length_penalty=0.0, early_stopping=EarlyStopping.FIRST,
         stop_token_ids=tuple(range(3, 510, 11)), min_tokens=3),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return random_gguf(tmp_path_factory.mktemp("model") / "model.gguf")


@pytest.fixture(scope="module")
def slow(path):
    """The hypotheses of each of SEARCHES."""
    model = load_model(path, "float32")

    def logprobs(tokens: list[int]) -> np.ndarray:
        padded = tokens + [0] * (LONGEST - len(tokens))
        logits = full_logits(model.params, model.config, padded)[len(tokens) - 1].astype(np.float64)
        return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()

    def search(params: dict):
        one = BeamSearch(resolve(SamplingParams(**params), LIMITS, len(PROMPT)))
        live = [list(PROMPT)]
        while True:
            for number, tokens in enumerate(live):
                row = logprobs(tokens)
                order = np.argsort(-row, kind="stable")[:128]
                one.report(number, Candidates(order.astype(np.int32), row[order].astype(np.float32)))
            moves = one.advance()
            if not moves:
                return one.best()
            live = [[*live[move.parent], move.token_id] for move in moves]

    return [search(params) for params in SEARCHES]


def beams(params: dict) -> GenerateRequest:
    return GenerateRequest(prompt_token_ids=PROMPT, sampling_params=SamplingParams(**params))


def check(update, wanted) -> None:
    assert [delta.index for delta in update.outputs] == list(range(len(wanted)))
    for delta, hypothesis in zip(update.outputs, wanted):
        assert delta.token_ids == [token.token_id for token in hypothesis.last.path()]
        assert delta.cumulative_logprob == pytest.approx(hypothesis.logprob, abs=1e-3)
        assert (delta.finish_reason, delta.matched_stop) == (hypothesis.reason, hypothesis.matched_stop)
        if delta.logprobs is not None:
            assert [entry.chosen.token_id for entry in delta.logprobs] == delta.token_ids
            assert sum(entry.chosen.logprob for entry in delta.logprobs) == pytest.approx(hypothesis.logprob, abs=1e-3)
            assert all(len(entry.top) in (2, 3) for entry in delta.logprobs)


@pytest.mark.parametrize("preemption", [None, "recompute", "swap"])
@pytest.mark.parametrize("overlap", [True, False])
def test_beams_equal_the_slow_search(path, slow, overlap, preemption):
    with engine_of(path, kv={"preemption": preemption or "auto"}, scheduler={"overlap": overlap}) as engine:
        if preemption is not None:
            preempt_every(engine, 3, most=10)  # beams need more than three steps to come back
        others = [request([3 + i, 4], 12, ignore_eos=True) for i in range(2)] + [request(PROMPT, 6, n=2, **DRAWN)]
        updates = answers(engine, [*map(beams, SEARCHES), *others])
        if preemption == "swap":
            assert engine.loads().num_swap_preemptions > 4
    for update, wanted in zip(updates, slow):
        check(update, wanted)
        assert update.usage.completion_tokens == sum(len(delta.token_ids) for delta in update.outputs)


def test_a_stop_string_ends_a_beam_and_text_is_cut_before_it(path):
    plain = dict(beam_width=3, max_tokens=8, n=3)
    with engine_of(path) as engine:
        [without] = answers(engine, [beams(plain)])
        text = without.outputs[0].text
        stop = next(piece for piece in (text[at : at + 2] for at in range(2, len(text))) if "\ufffd" not in piece and piece)
        [update] = answers(engine, [beams(plain | {"stop": (stop,)})])
    for delta in update.outputs:
        assert stop not in delta.text
        assert (delta.finish_reason is FinishReason.STOP) == (delta.matched_stop == stop)
    assert any(delta.matched_stop == stop for delta in update.outputs)


def test_an_abort_at_any_time_ends_every_beam(path):
    async def cancelled(engine, delay_s: float):
        updates = engine.generate(beams(dict(beam_width=4, max_tokens=60, n=2)))
        task = asyncio.ensure_future(updates.__anext__())
        await asyncio.sleep(delay_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await updates.aclose()

    async def named(engine) -> list:
        params = SamplingParams(beam_width=3, max_tokens=100, n=2)
        job = asyncio.ensure_future(
            engine.generate_all(GenerateRequest(prompt_token_ids=PROMPT, sampling_params=params, request_id="b"))
        )
        await asyncio.sleep(0.05)
        assert await engine.abort("b")
        return [delta.finish_reason for delta in (await job).outputs]

    async def work(engine):
        await asyncio.gather(*(cancelled(engine, delay_s) for delay_s in (0.0, 0.01, 0.03, 0.1)))
        assert await named(engine) == [FinishReason.ABORTED] * 2

    with engine_of(path) as engine:
        preempt_every(engine, 4, most=20)
        run(work(engine))
        wait_idle(engine)


def test_beams_share_the_prompt_with_the_prefix_cache(path):
    with engine_of(path) as engine:
        answers(engine, [request(PROMPT, 1, ignore_eos=True)])
        [update] = answers(engine, [beams(SEARCHES[1])])
    assert update.usage.cached_tokens == 32 and len(outputs(update)) == 2
