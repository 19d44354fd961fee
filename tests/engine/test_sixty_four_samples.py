"""n = 64, the most there may be: all run at once, share the prompt, and are copied apart in one program of one step."""

from __future__ import annotations

import pytest

from tests.support.engines import answers, request, running_engine
from tests.support.tiny_models import random_gguf

PROMPT = [(7 * i) % 500 for i in range(43)]  # five blocks of 8, and three tokens
DRAWN = dict(temperature=1.0, seed=11, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return random_gguf(tmp_path_factory.mktemp("model") / "model.gguf")


def outputs(update) -> list[list[int]]:
    return [delta.token_ids for delta in sorted(update.outputs, key=lambda delta: delta.index)]


def test_sixty_four_samples_share_the_prompt_and_are_copied_apart_at_once(path):
    sections = dict(
        kv={"num_blocks": 160, "memory_bytes": None, "block_size": 8},
        scheduler={"max_num_batched_tokens": 64, "max_num_seqs": 64},
    )
    with running_engine(path, **sections) as engine:
        programs = engine._loop._runner._programs.blocks
        compiled, check = programs._compiled["copy", 0], engine._loop.on_step
        calls, saved, steps = [], [0], []

        def counted(pool, pairs, count):
            calls.append((engine._loop.totals.num_steps, int(count)))
            return compiled(pool, pairs, count)

        def on_step(scheduler) -> None:
            saved.append(engine.loads().num_saved_blocks)
            check(scheduler)

        programs._compiled["copy", 0] = counted
        engine._loop.on_step = on_step
        [together] = answers(engine, [request(PROMPT, 6, n=64, **DRAWN)])
        computed = engine._loop.totals.scheduled_tokens
        engine._loop.on_step = check
        [again] = answers(engine, [request(PROMPT, 6, n=64, **DRAWN)])
        [few] = answers(engine, [request(PROMPT, 6, n=3, **DRAWN)])
    assert len({tuple(one) for one in outputs(together)}) > 60, "samples of their own"
    assert outputs(again) == outputs(together) and outputs(few) == outputs(together)[:3]
    assert together.usage.completion_tokens == 64 * 6 and together.usage.prompt_tokens == len(PROMPT)
    # The prompt once; its last token and five more by each sample.
    assert computed <= len(PROMPT) + 63 + 64 * 5 + 64
    assert calls[0][1] == 63, "a copy of the partial last block for each sample but the one that wrote it"
    assert len({step for step, _ in calls}) == len(calls), "one program a step"
    assert max(saved) == 63 * 5, "all but one of the five full blocks of each, in GetLoads"
