"""Models with windows: each layer group's blocks, and their scales, come back from host memory and disk, those behind the
window stay away."""

from __future__ import annotations

import random

import pytest

from tests.engine.test_tiers import same
from tests.engine.test_windows import SMALL, Naive, model  # noqa: F401  (a fixture)
from tests.support.engines import answers, request, running_engine, token_ids

pytestmark = pytest.mark.xdist_group("windows")
PROMPT = [3 + (7 * i) % 90 for i in range(41)]  # ten blocks of 4, and the token that is always computed


def test_cold_host_and_disk_hits_give_the_same(model, tmp_path):  # noqa: F811
    folder, theirs = model
    dtype = "int8" if theirs.config.model_type == "gemma2" else "float32"  # with scales in the blocks of both groups
    kv = {"disk_path": str(tmp_path / "kv"), "host_memory_bytes": 2**22, "poison_freed": True, "dtype": dtype}
    sections = {**SMALL, "kv": {**SMALL["kv"], **kv}}

    def ask(engine, prompt=PROMPT):
        [update] = answers(engine, [request(prompt, 8, ignore_eos=True, logprobs=2)])
        return update

    rng, got = random.Random(1), []
    with running_engine(folder, **sections) as engine:
        got.append(ask(engine))
        for _ in range(3):
            ask(engine, [3 + rng.randrange(90) for _ in range(60)])
        got.append(ask(engine))
        assert engine.loads().host_tier_hit_tokens > 0
    with running_engine(folder, **sections) as engine:
        got.append(ask(engine))
        assert engine.loads().disk_tier_hit_tokens > 0
    assert [one.usage.cached_tokens for one in got] == [0, 40, 40]
    if dtype == "float32":
        assert token_ids(got[0]) == Naive(folder)(PROMPT, 8)
    for one in got[1:]:
        assert token_ids(one) == token_ids(got[0])
        same(one, got[0])
