import asyncio
import json

import pytest

from jserve.bench import latency, throughput
from jserve.bench.driver import engine_stream, measure, run_closed
from jserve.bench.load import RandomLoad, ordinary_token_ids
from jserve.config import ConfigError
from jserve.request import Code, FinishReason, GenerateRequest, GenerateUpdate, OutputDelta, RequestError, Usage
from tests.support.in_process import InProcessEngine

IDS = range(3, 200)


def prompts(load: RandomLoad) -> list[tuple[int, ...]]:
    return [tuple(request.prompt_token_ids) for request in load.checked(4096).requests(IDS)]


def test_lengths_are_exact_without_a_ratio_and_within_it_with_one():
    requests = RandomLoad(20, 16, 8).checked(4096).requests(IDS)
    assert {len(request.prompt_token_ids) for request in requests} == {16}
    assert {request.sampling_params.max_tokens for request in requests} == {8}
    varied = RandomLoad(300, 16, 8, range_ratio=0.5).checked(4096).requests(IDS)
    lengths = [len(request.prompt_token_ids) for request in varied]
    assert min(lengths) == 8 and max(lengths) == 24


def test_two_runs_share_no_prompt_unless_they_name_a_seed():
    assert not set(prompts(RandomLoad(20, 16, 8))) & set(prompts(RandomLoad(20, 16, 8)))
    assert prompts(RandomLoad(20, 16, 8, seed=1)) == prompts(RandomLoad(20, 16, 8, seed=1))
    assert not set(prompts(RandomLoad(20, 16, 8, seed=1))) & set(prompts(RandomLoad(20, 16, 8, seed=2)))


def test_warm_ups_share_no_prompt_with_the_run():
    load = RandomLoad(20, 16, 8, seed=1)
    warm_ups = {tuple(request.prompt_token_ids) for request in load.warm_ups(20, IDS)}
    assert not warm_ups & set(prompts(load))


def test_control_tokens_are_never_drawn():
    engine = InProcessEngine()
    ids = ordinary_token_ids(engine.info)
    assert 256 not in ids and not set(engine.info.eos_token_ids) & set(ids) and len(ids) == 254


def test_what_cannot_fit_is_refused_before_anything_runs():
    with pytest.raises(ConfigError, match="can be 60 tokens; the model's context is 50"):
        RandomLoad(1, 20, 20, range_ratio=0.5).checked(50)


class Scripted:
    """Yields (delay, number of tokens) as updates, then ends as told."""

    def __init__(self, steps, ending="usage"):
        self.steps, self.ending = steps, ending

    async def generate(self, request):
        for number, (delay, count) in enumerate(self.steps):
            await asyncio.sleep(delay)
            last = number == len(self.steps) - 1 and self.ending == "usage"
            delta = OutputDelta(0, "x", list(range(count)), finish_reason=FinishReason.LENGTH if last else None)
            yield GenerateUpdate("r", [delta] if count or last else [], usage=Usage(7, 11, 3) if last else None)
        if isinstance(self.ending, RequestError):
            raise self.ending


async def measured(steps, ending="usage"):
    return await measure(engine_stream(Scripted(steps, ending)), GenerateRequest(prompt_token_ids=[1] * 7))


async def test_a_stream_with_a_known_schedule():
    """3 tokens at 100 ms, 4 after 40 ms more, an empty update, 4 more: as in the figures of test_report."""
    record = await measured([(0.1, 3), (0.04, 4), (0.0, 0), (0.04, 4), (0.0, 0)])
    assert record.error is None and record.output_tokens == 11 and record.cached_tokens == 3
    assert [count for _, count in record.arrivals] == [3, 4, 4]
    assert 0.1 <= record.ttft < 0.15
    assert 0.18 <= record.e2el < 0.28


async def test_failures_are_told_apart():
    assert (await measured([], ending=None)).error == "empty"
    assert (await measured([(0, 0)])).error == "empty"
    assert (await measured([(0, 3)], ending=None)).error == "cut"
    refusal = RequestError(Code.RESOURCE_EXHAUSTED, "full")
    assert (await measured([], ending=refusal)).error == "RESOURCE_EXHAUSTED"
    assert (await measured([(0, 3)], ending=refusal)).error == "RESOURCE_EXHAUSTED"


async def test_a_closed_loop_keeps_so_many_open_and_answers_in_order():
    engine = InProcessEngine(step_s=0.001)
    requests = RandomLoad(30, 4, 5, range_ratio=1.0, seed=3).requests(IDS)
    done = []
    records = await run_closed(engine_stream(engine), requests, 4, on_done=done.append)
    assert engine.most_open == 4
    assert [record.output_tokens for record in records] == [r.sampling_params.max_tokens for r in requests]
    assert len(done) == 30


async def test_a_report_of_a_whole_run():
    engine = InProcessEngine(step_s=0.0005)
    figures, records = await throughput.run(engine, RandomLoad(12, 8, 6), concurrency=3, num_warmups=2)
    assert (figures["completed"], figures["failed"]) == (12, 0)
    assert figures["total_input_tokens"] == 12 * 8 and figures["total_output_tokens"] == 12 * 6, "no warm-up in it"
    assert figures["max_concurrency"] == 3 and figures["max_concurrent_requests"] == 3
    assert figures["padded_token_share"] == pytest.approx(0.75)
    assert figures["compiles_after_ready"] == 0
    assert isinstance(figures["seed"], int) and figures["mode"] == "throughput"
    assert len(engine.requests) == 14 and [record.output_tokens for record in records] == [6] * 12
    json.dumps(figures)


async def test_latency_has_one_request_open():
    engine = InProcessEngine()
    figures, _ = await latency.run(engine, RandomLoad(5, 8, 6), percentiles=latency.PERCENTILES)
    assert engine.most_open == 1 and figures["max_concurrency"] == 1
    assert figures["p10_ttft_ms"] <= figures["p90_ttft_ms"]
