"""Whatever chunks a prompt comes in, and though it is preempted between them: the same scores once, the same draws."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jserve.weights.load import load_model
from tests.support.engines import answers, request, run, running_engine
from tests.support.tiny_models import full_logits, random_gguf

PROMPT = [(7 * i) % 500 for i in range(37)]
DRAWN = dict(temperature=0.9, seed=11, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return random_gguf(tmp_path_factory.mktemp("model") / "model.gguf")


@pytest.fixture(scope="module")
def expected(path):
    """log-softmax of the whole prompt at once: f64[37, V]."""
    model = load_model(path, "float32")
    logits = full_logits(model.params, model.config, PROMPT).astype(np.float64)
    logits -= logits.max(1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


@pytest.fixture(scope="module")
def drawn(path):
    """Three samples of PROMPT where it comes in one chunk and nothing else runs."""
    with running_engine(path, scheduler={"max_num_batched_tokens": 64, "max_num_seqs": 4}) as engine:
        [update] = answers(engine, [request(PROMPT, 7, n=3, **DRAWN)])
    return samples(update)


def samples(update) -> list[list[int]]:
    return [output.token_ids for output in sorted(update.outputs, key=lambda output: output.index)]


def preempt_once(engine, after_step: int) -> None:
    check, steps = engine._loop.on_step, itertools.count(1)

    def on_step(scheduler) -> None:
        if next(steps) == after_step and (running := scheduler.running()):
            scheduler._preempt(running[-1])
        check(scheduler)

    engine._loop.on_step = on_step


@pytest.mark.parametrize("chunk", [1, 8, 37])
def test_scores_come_once_and_draws_do_not_depend_on_chunks(chunk, path, expected, drawn):
    limits = {"max_num_batched_tokens": chunk, "max_num_seqs": min(chunk, 4)}
    scored = request(PROMPT, 3, prompt_logprobs=2, logprobs=3, ignore_eos=True)

    async def updates_of(engine):
        first_token_step, updates = None, []
        async for update in engine.generate(scored):
            updates.append(update)
            if first_token_step is None and any(output.token_ids for output in update.outputs):
                first_token_step = engine.loads().num_steps
        return first_token_step, updates

    with running_engine(path, scheduler=limits) as engine:
        preempt_once(engine, after_step=2)
        first_token_step, cold = run(updates_of(engine))
        num_preemptions = engine.loads().num_preemptions
        _, warm = run(updates_of(engine))
        neighbour = request([3, 4], 12, ignore_eos=True)
        [alone] = answers(engine, [request(PROMPT, 7, n=3, **DRAWN)])
        _, beside = answers(engine, [neighbour, request(PROMPT, 7, n=3, **DRAWN)])
    assert num_preemptions == 1
    assert first_token_step >= -(-len(PROMPT) // chunk), "a token before the last chunk"
    for updates in (cold, warm):
        [scores] = [update.prompt_logprobs for update in updates if update.prompt_logprobs is not None]
        assert updates[-1].usage.cached_tokens == 0 and len(scores) == len(PROMPT) and scores[0] is None
        for position, entry in enumerate(scores[1:]):
            assert entry.chosen.token_id == PROMPT[position + 1]
            for one in (entry.chosen, *entry.top):
                assert one.logprob == pytest.approx(expected[position, one.token_id], abs=2e-5)
        entries = [entry for update in updates for output in update.outputs for entry in output.logprobs or ()]
        tokens = [token for update in updates for output in update.outputs for token in output.token_ids]
        assert [entry.chosen.token_id for entry in entries] == tokens and len(tokens) == 3
        assert entries[0].chosen.logprob == pytest.approx(expected[-1].max(), abs=2e-5)
    assert samples(alone) == samples(beside) == drawn
