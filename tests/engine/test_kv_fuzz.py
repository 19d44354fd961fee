"""Everything at once over pools down to the smallest that will do: prefix families, samples, beams, salts, preemption of
each kind, tiers, aborts and flushes.  Greedy tokens are the naive oracle's; samples and beams those they get alone."""

from __future__ import annotations

import asyncio
import dataclasses
import random

import pytest

from jserve.engine.step_log import KvSettings
from jserve.scheduler import PreemptionSettings
from jserve.weights.load import load_model
from tests.support.arrivals import force_preemptions
from tests.support.engines import answers, request, run, running_engine, wait_idle
from tests.support.tiny_models import full_logits, random_gguf

LONGEST = 96
SECTIONS = dict(
    kv={"num_blocks": 64, "memory_bytes": None, "block_size": 8, "poison_freed": True, "host_memory_bytes": 400_000},
    scheduler={"max_num_batched_tokens": 32, "max_num_seqs": 16},
)
FAMILIES = [[random.Random(seed).randrange(500) for _ in range(60)] for seed in range(3)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return random_gguf(tmp_path_factory.mktemp("model") / "model.gguf")


def engine_of(path, **kv):
    return running_engine(path, kv={**SECTIONS["kv"], **kv}, scheduler=SECTIONS["scheduler"])


def make_work() -> list:
    """64 prompts with a marker of their own each, of three families, and what has several outputs."""
    rng = random.Random(5)
    made = []
    for marker in range(64):
        prompt = rng.choice(FAMILIES)[: rng.choice((0, 16, 16, 40, 57))] + [marker, 7]
        made.append(request(prompt, rng.randint(1, 10), ignore_eos=True))
    for at, family in enumerate(FAMILIES):
        made.append(request(family[:30] + [at], 9, n=3, temperature=1.0, seed=at, ignore_eos=True))
        made.append(request(family[:30] + [at], 7, beam_width=3, n=2, temperature=None))
    salted = [dataclasses.replace(one, cache_salt=f"salt {at % 2}") for at, one in enumerate(made[-6:])]
    bypassing = [dataclasses.replace(one, bypass_prefix_cache=True) for one in made[-6:]]
    made += salted + bypassing
    rng.shuffle(made)
    return made


@pytest.fixture(scope="module")
def expected(path):
    """What each gets with nothing else running; the greedy ones checked against the whole sequence computed at once."""
    model = load_model(path, "float32")
    with engine_of(path, prefix_cache=False) as engine:
        alone = [outputs(answers(engine, [one])[0]) for one in make_work()]
    for one, got in zip(make_work(), alone):
        if len(got) == 1:
            ids, count = [*one.prompt_token_ids, *got[0]], len(one.prompt_token_ids)
            best = full_logits(model.params, model.config, ids + [0] * (LONGEST - len(ids))).argmax(axis=1).tolist()
            assert best[count - 1 : len(ids) - 1] == got[0]
    return alone


def outputs(update) -> list[list[int]]:
    return [delta.token_ids for delta in sorted(update.outputs, key=lambda delta: delta.index)]


@pytest.mark.parametrize(("num_blocks", "kind", "preempts", "kv"), [
    (64, "auto", None, {}),
    (30, "recompute", 4, {}),
    (30, "swap", 3, {}),
    (14, "swap", None, {}),
    (14, "recompute", None, {"host_tier": False}),
    (14, "swap", 1, {}),
    (14, "recompute", 1, {"prefix_cache": False}),
])
def test_everyone_gets_their_own_tokens(path, expected, monkeypatch, num_blocks, kind, preempts, kv):
    make = KvSettings.make
    fewer = lambda self, *given: make(dataclasses.replace(self, num_blocks=(num_blocks,)), *given)  # noqa: E731
    monkeypatch.setattr(KvSettings, "make", fewer)
    rng, work, results, left = random.Random(f"{num_blocks} {kind}"), make_work(), {}, set()
    with engine_of(path, **kv) as engine:
        assert engine._scheduler.blocks.num_total_blocks == num_blocks - 1
        engine._scheduler.preemption = PreemptionSettings(kind)
        if preempts is not None:
            force_preemptions(engine, preempts)
        queue = list(range(len(work)))

        async def client() -> None:
            while queue:
                at = queue.pop(0)
                if rng.random() < 0.15:  # leaves with the first token
                    updates = engine.generate(work[at])
                    async for _ in updates:
                        break
                    await updates.aclose()
                    left.add(at)
                    continue
                results[at] = outputs(await engine.generate_all(work[at]))
                if rng.random() < 0.05:
                    await engine.flush_cache()

        async def clients() -> None:
            await asyncio.gather(*(client() for _ in range(16)))

        run(clients())
        wait_idle(engine)
        loads = engine.loads()
        assert engine._scheduler.blocks.num_cached_blocks + engine._scheduler.blocks.num_free_blocks == num_blocks - 1
        [late] = answers(engine, [work[0]])
    assert len(results) + len(left) == len(work) and len(left) > 3 and outputs(late) == expected[0]
    assert results == {at: expected[at] for at in results}
    if preempts is not None:
        assert loads.num_preemptions > 10 and (loads.num_swap_preemptions > 5) == (kind == "swap")
