"""A request preempted at a given token of its output, once or twice in a row: ids, text, log-probabilities, end, usage
and stream are those of an undisturbed run."""

from __future__ import annotations

import pytest

from tests.engine.test_parallel_sampling import PROMPT, engine_of
from tests.support.engines import request, run, wait_idle
from tests.support.tiny_models import random_gguf

BLOCK = 8
SHAPED = dict(
    repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3, min_tokens=5, logprobs=3, ignore_eos=True
)
WAYS = {"greedy": dict(temperature=0.0), "drawn": dict(temperature=0.9, top_p=0.95, seed=17)}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return random_gguf(tmp_path_factory.mktemp("model") / "model.gguf")


@pytest.fixture(scope="module", params=["recompute", "swap"])
def engine(request, path):
    with engine_of(path, kv={"preemption": request.param}) as made:
        yield made


async def streamed(engine, one) -> tuple:
    """(ids, text, log-probabilities by token, end, usage), put together from what came piece by piece."""
    ids, text, logprobs, reason, usage = [], "", [], None, None
    async for update in engine.generate(one):
        for delta in update.outputs:
            assert reason is None, "something came behind the end"
            ids += delta.token_ids
            text += delta.text
            logprobs += delta.logprobs or []
            reason = delta.finish_reason or reason
        usage = update.usage or usage
    assert len(logprobs) == len(ids) and [entry.chosen.token_id for entry in logprobs] == ids
    return ids, text, logprobs, (reason, usage.prompt_tokens, usage.completion_tokens)


def preempt_at(engine, num_output: int, times: int) -> list[int]:
    """Preempts whoever runs when that many tokens are known, again as soon as it is back; returns where it was done."""
    check, done = engine._loop.on_step, []

    def on_step(scheduler) -> None:
        for one in scheduler.running():
            if one.num_output >= num_output and len(done) < times:
                scheduler._preempt(one)
                done.append(one.num_output)
        check(scheduler)

    engine._loop.on_step = on_step
    return done


@pytest.mark.parametrize("way", WAYS)
def test_nothing_changes(engine, way):
    check = engine._loop.on_step
    plain = request(PROMPT, 40, **{**SHAPED, **WAYS[way]})
    ids, text, _, _ = run(streamed(engine, plain))
    stop = next(text[at : at + 2] for at in range(len(text) - 12, len(text)) if "\ufffd" not in text[at : at + 2])
    for params in ({}, {"stop": (stop,)}):
        asked = request(PROMPT, 40, **{**SHAPED, **WAYS[way], **params})
        run(engine.flush_cache())
        clean = run(streamed(engine, asked))
        wait_idle(engine)  # a stop string is found by another thread than the steps run in
        assert len(clean[0]) > BLOCK + 5 and (clean[0] == ids[: len(clean[0])])
        for num_output in (1, 5, BLOCK - len(PROMPT) % BLOCK, 7, BLOCK, BLOCK + 1):
            for times in (1, 2):
                run(engine.flush_cache())
                preemptions = engine.loads().num_preemptions
                done = preempt_at(engine, num_output, times)
                got = run(streamed(engine, asked))
                wait_idle(engine)
                engine._loop.on_step = check
                assert engine.loads().num_preemptions - preemptions == len(done) == times
                assert (got[0], got[1], got[3]) == (clean[0], clean[1], clean[3])
                for mine, other in zip(got[2], clean[2]):
                    assert [entry.token_id for entry in mine.top] == [entry.token_id for entry in other.top]
                    assert mine.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-5)
