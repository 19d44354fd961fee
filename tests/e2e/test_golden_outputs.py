"""SmolLM2 over real gRPC against outputs that another program computed (tests/golden): token for token, and logprobs.

Two right float32 programs may part where the best two logits are closer than 1e-3; nowhere else.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from jserve.engine.build import build_engine
from jserve.request import FinishReason, GenerateRequest, GenerateUpdate, Message, SamplingParams
from tests.support.engines import config_for
from tests.support.grpc_server import serving
from tests.support.smollm2 import smollm2_gguf

pytestmark = [pytest.mark.xdist_group("smollm2"), pytest.mark.slow]

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "greedy.json").read_text())
MARGIN = 1e-3
LOGPROB_ERROR = 2e-3

SETTINGS = {
    "budget 512": {"scheduler": {"max_num_batched_tokens": 512, "max_num_seqs": 16}, "kv": {"block_size": 32}},
    "budget 64": {"scheduler": {"max_num_batched_tokens": 64, "max_num_seqs": 16}, "kv": {"block_size": 32}},
    "budget 16": {"scheduler": {"max_num_batched_tokens": 16, "max_num_seqs": 8}, "kv": {"block_size": 64}},
    # 20 usable blocks of 32 hold the longest prompt with its output, and little beside it.
    "pool of 640 tokens": {"scheduler": {"max_num_batched_tokens": 64, "max_num_seqs": 16}, "kv": {"num_blocks": 21, "block_size": 32}},
}


@pytest.fixture(scope="module")
def engines():
    """Engines by setting, built when first asked for."""
    built = {}

    def engine(name: str):
        if name not in built:
            for other in built:  # one at a time: each holds the weights
                built.pop(other).stop()
                break
            sections = {"kv": {"memory_bytes": 256 * 2**20}, **SETTINGS[name]}
            built[name] = build_engine(config_for(smollm2_gguf(), every_bucket=name == "budget 512", **sections))
        return built[name]

    yield engine
    for one in built.values():
        one.stop()


def request(record: dict, **params) -> GenerateRequest:
    params = SamplingParams(temperature=0.0, max_tokens=48, logprobs=5, **params)
    if record["kind"] == "chat":
        messages = record["source"]
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return GenerateRequest(messages=[Message(m["role"], m["content"]) for m in messages], sampling_params=params)
    return GenerateRequest(prompt_token_ids=record["prompt_token_ids"], sampling_params=params)


def check(record: dict, update: GenerateUpdate) -> None:
    output = update.outputs[0]
    sure = next((i for i, step in enumerate(record["steps"]) if margin(step) < MARGIN), len(record["steps"]))
    assert output.token_ids[:sure] == record["generated_token_ids"][:sure]
    for entry, step in zip(output.logprobs[:sure], record["steps"]):
        assert entry.chosen.logprob == pytest.approx(step["logprob"], abs=LOGPROB_ERROR)
        assert [top.logprob for top in entry.top[:5]] == pytest.approx([p for _, p in step["top5"]], abs=LOGPROB_ERROR)
    if sure == len(record["steps"]):
        assert output.text == record["text"]
        assert output.finish_reason is FinishReason(record["finish"])
        assert update.usage.completion_tokens == len(record["generated_token_ids"])
    assert update.usage.prompt_tokens == len(record["prompt_token_ids"])


def margin(step: dict) -> float:
    return step["top5"][0][1] - step["top5"][1][1]


async def joined(client, one: GenerateRequest) -> GenerateUpdate:
    """The stream of a request as one update, by the client's eyes."""
    whole: GenerateUpdate | None = None
    async for update in client.generate(one):
        if whole is None:
            whole = update
            continue
        for delta in update.outputs:
            mine = whole.outputs[0]
            mine.text += delta.text
            mine.token_ids += delta.token_ids
            mine.logprobs = (mine.logprobs or []) + (delta.logprobs or [])
            mine.finish_reason = delta.finish_reason or mine.finish_reason
        whole.usage = update.usage or whole.usage
        assert update.prompt_logprobs is None
    return whole


@pytest.mark.parametrize("setting", SETTINGS)
async def test_all_prompts_at_once(engines, setting):
    engine = engines(setting)
    async with serving(engine) as (_, client):
        for _ in range(2):  # the second time from the prefix cache
            updates = await asyncio.gather(*(joined(client, request(record)) for record in GOLDEN))
            for record, update in zip(GOLDEN, updates):
                check(record, update)
        assert await client.check_integrity() == []
        assert updates[0].usage.cached_tokens == 0  # its prompt fills no block
        if "pool" not in setting:  # a pool that small keeps nothing from one round to the next
            assert max(u.usage.cached_tokens for u in updates) >= 32
    assert engine.loads().compiles_after_ready == 0
    assert engine.loads().kv_usage == 0


async def test_each_prompt_alone_with_the_logprobs_of_its_prompt(engines):
    engine = engines("budget 64")
    async with serving(engine) as (_, client):
        for record in GOLDEN:
            update = await client.generate_unary(request(record, prompt_logprobs=1))
            check(record, update)
            assert update.prompt_logprobs[0] is None
            assert len(update.prompt_logprobs) == len(record["prompt_token_ids"])
            for entry, want in zip(update.prompt_logprobs[1:], (record["prompt_logprobs"] or [])[1:]):
                assert entry.chosen.logprob == pytest.approx(want, abs=LOGPROB_ERROR)
    assert engine.loads().compiles_after_ready == 0


async def test_every_decode_and_mixed_bucket_gives_the_same_tokens(engines):
    """A prompt in the company of 0, 1, ... others, so that its decodes run in every sequence bucket and its chunks in
    every token bucket."""
    engine = engines("budget 512")
    record = next(r for r in GOLDEN if len(r["prompt_token_ids"]) > 300)
    rng = random.Random(0)
    seen = set()
    launch = engine._loop._runner.launch

    def watched(plan):
        seen.add((plan.bucket, plan.decode_only))
        launch(plan)

    engine._loop._runner.launch = watched
    async with serving(engine) as (_, client):
        for company in (0, 1, 3, 7, 15):
            others = [
                GenerateRequest(
                    prompt_token_ids=[rng.randrange(20, 40000) for _ in range(rng.randrange(1, 40))],
                    sampling_params=SamplingParams(temperature=0.8, seed=i, max_tokens=60, ignore_eos=True),
                    bypass_prefix_cache=True,
                )
                for i in range(company)
            ]
            mine = request(record)
            mine = GenerateRequest(**{**mine.__dict__, "bypass_prefix_cache": True})
            updates = await asyncio.gather(*(joined(client, one) for one in [mine, *others]))
            check(record, updates[0])
        for length in (2, 17, 33, 65, 129, 190, 257, 500):  # chunks that fill each mixed bucket
            await client.generate_unary(
                GenerateRequest(
                    prompt_token_ids=list(range(1000, 1000 + length)), bypass_prefix_cache=True,
                    sampling_params=SamplingParams(temperature=0.0, max_tokens=1),
                )
            )
    engine._loop._runner.launch = launch
    plan = engine._loop._runner._programs.plan
    assert {bucket for bucket, decode in seen if decode} == set(plan.sequence_buckets)
    assert {bucket for bucket, decode in seen if not decode} == set(plan.token_buckets)
    assert engine.loads().compiles_after_ready == 0
