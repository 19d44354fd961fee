"""The metrics page, read by a Prometheus parser: names, values at rest, and sums that hold at any scrape."""

from __future__ import annotations

import asyncio
import json
import math
import re
import urllib.request
from contextlib import aclosing
from pathlib import Path

import pytest
from prometheus_client import Histogram
from prometheus_client.parser import text_string_to_metric_families

from jserve.config import Config
from jserve.request import Code, GenerateRequest, RequestError, SamplingParams
from jserve.server.metrics_page import metrics_page
from tests.support.grpc_server import until
from tests.support.stand_in import stand_in_engine

GAUGES = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "kv_blocks_saved", "kv_host_cached_blocks"
)
COUNTERS = (
    "prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens",
    "request_success", "padded_tokens", "compiles_after_ready", "preempted_tokens_lost",
    "num_swap_preemptions", "swapped_out_bytes", "swapped_in_bytes",
    "prefix_cache_tier_hits", "kv_tier_saved_bytes", "kv_tier_loaded_bytes",
)
HISTOGRAMS = (
    "iteration_tokens_total", "time_to_first_token_seconds", "inter_token_latency_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "step_host_seconds", "step_device_seconds",
)
DASHBOARD = Path(__file__).resolve().parents[2] / "configs" / "grafana.json"


def scrape(port: int) -> dict[str, float]:
    """Value by sample name; labels other than the model's name and le are appended, as name{reason}."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "stand-in", sample
            labels = [value for key, value in sample.labels.items() if key != "model_name"]
            found[sample.name + (f"{{{','.join(labels)}}}" if labels else "")] = sample.value
            assert math.isfinite(sample.value)
    return found


@pytest.fixture
def served():
    with stand_in_engine(step_s=0.002, max_waiting=5) as engine:
        section = Config().replace("server", metrics_port=0).server
        with metrics_page(section, engine) as port:
            yield engine, port


def request(name: str, prompt: int = 6, max_tokens: int = 5, **params) -> GenerateRequest:
    ids = [1 + ord(name[-1]) % 200] * prompt
    return GenerateRequest(
        prompt_token_ids=ids, request_id=name, sampling_params=SamplingParams(max_tokens=max_tokens, **params)
    )


async def served_whole(engine, one: GenerateRequest):
    return await engine.generate_all(one)


def outcomes(found: dict[str, float]) -> float:
    ended = sum(found[f"jserve:request_success_total{{{reason}}}"] for reason in ("stop", "length", "abort"))
    return ended + found["jserve:requests_failed_total"] + found["jserve:requests_refused_total"]


async def test_every_name_of_the_api_is_on_the_page(served):
    engine, port = served
    await asyncio.gather(*(served_whole(engine, request(f"r{n}")) for n in range(5)))
    found = scrape(port)
    for name in GAUGES:
        assert f"jserve:{name}" in found
    for name in COUNTERS:
        assert any(sample.startswith(f"jserve:{name}_total") for sample in found), name
    for name in HISTOGRAMS:
        assert found[f"jserve:{name}_count"] > 0 and f"jserve:{name}_sum" in found, name
        assert found[f"jserve:{name}_bucket{{+Inf}}"] == found[f"jserve:{name}_count"]
    assert found["jserve:time_to_first_token_seconds_count"] == 5
    assert found["jserve:inter_token_latency_seconds_count"] == 5 * 4
    assert found["jserve:prompt_tokens_total"] == 30 and found["jserve:generation_tokens_total"] == 25
    assert found["jserve:request_success_total{length}"] == 5
    computed = found["jserve:iteration_tokens_total_sum"]
    assert computed == found["jserve:prompt_tokens_total"] - found["jserve:prefix_cache_hits_total"] + 5 * 4


async def test_every_expression_of_the_dashboard_names_what_is_on_the_page(served):
    engine, port = served
    await served_whole(engine, request("r"))
    names = {re.sub(r"\{.*", "", name) for name in scrape(port)}
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    used = {name for text in expressions for name in re.findall(r"jserve:\w+", text)}
    assert len(used) >= 15 and used <= names, used - names


async def test_after_everything_is_aborted_the_gauges_are_zero_without_a_step(served):
    engine, port = served
    engine._max_waiting = 100

    async def read(one):
        async with aclosing(engine.generate(one)) as updates:
            async for _ in updates:
                pass

    reading = [asyncio.ensure_future(read(request(f"r{n}", max_tokens=200))) for n in range(20)]
    await until(lambda: engine.loads().num_running == 4)
    assert scrape(port)["jserve:num_requests_running"] == 4
    for n in range(20):
        await engine.abort(f"r{n}")
    await asyncio.gather(*reading)
    await until(lambda: engine.loads().kv_usage == 0)
    found = scrape(port)
    assert [found[f"jserve:{name}"] for name in GAUGES] == [0] * len(GAUGES)
    assert found["jserve:request_success_total{abort}"] == 20 == outcomes(found)


async def test_who_has_its_last_message_is_counted_no_more():
    """Also where text ended it, which the engine's thread hears of only then."""
    with stand_in_engine(step_s=0.05) as engine:
        update = await engine.generate_all(request("r", max_tokens=200, stop=list("aeiou"), ignore_eos=True))
        loads = engine.loads()
    assert update.outputs[0].matched_stop in list("aeiou")
    assert (loads.num_running, loads.num_waiting) == (0, 0)


async def test_outcomes_add_up_whatever_happens(served):
    """5 normal, 5 aborted in the queue, 5 aborted while they run, 5 refused; counters never fall on the way."""
    engine, port = served
    seen: list[dict[str, float]] = [scrape(port)]

    def look():
        found = scrape(port)
        for name, value in seen[-1].items():
            if name.split("{")[0].endswith(("_total", "_count", "_bucket", "_sum")):
                assert found[name] >= value, name
        loads = engine.loads()
        assert engine.counts.in_flight == loads.requests_accepted - (
            loads.requests_stopped + loads.requests_length + loads.requests_aborted + loads.requests_failed
        )
        seen.append(found)

    await asyncio.gather(*(served_whole(engine, request(f"n{n}")) for n in range(5)))
    look()
    running = [asyncio.ensure_future(served_whole(engine, request(f"r{n}", max_tokens=100))) for n in range(4)]
    await until(lambda: engine.loads().num_running == 4)
    queued = [asyncio.ensure_future(served_whole(engine, request(f"q{n}", max_tokens=100))) for n in range(5)]
    await until(lambda: engine.loads().num_waiting == 5)
    look()
    for n in range(3):
        with pytest.raises(RequestError) as refusal:
            await served_whole(engine, request(f"full{n}"))
        assert refusal.value.code is Code.RESOURCE_EXHAUSTED
    for wrong in (request("t", temperature=-1.0), request("p", top_p=2.0)):
        with pytest.raises(RequestError):
            await served_whole(engine, wrong)
    for n in range(5):
        assert await engine.abort(f"q{n}")
    for n in range(4):
        assert await engine.abort(f"r{n}")
    await asyncio.gather(*running, *queued)
    fifth = asyncio.ensure_future(served_whole(engine, request("r4", max_tokens=100)))
    await until(lambda: engine.loads().num_running == 1)
    await engine.abort("r4")
    await fifth
    look()
    assert outcomes(seen[-1]) == 20 and seen[-1]["jserve:requests_accepted_total"] == 15
    assert seen[-1]["jserve:request_success_total{length}"] == 5
    assert seen[-1]["jserve:request_success_total{abort}"] == 10


async def test_a_preempted_request_is_counted_once_and_its_lost_tokens_too():
    with stand_in_engine(step_s=0.0, num_blocks=14, max_num_seqs=4) as engine:
        answers = await asyncio.gather(*(served_whole(engine, request(f"r{n}", 8, 30)) for n in range(4)))
        loads = engine.loads()
        assert loads.num_preemptions > 0 and sum(a.metrics.num_preemptions for a in answers) == loads.num_preemptions
        assert (loads.requests_accepted, loads.requests_length, loads.generated_tokens) == (4, 4, 120)
        assert {answer.usage.completion_tokens for answer in answers} == {30}


async def test_a_metric_that_breaks_costs_nobody_a_step(served, monkeypatch, caplog):
    engine, port = served

    def broken(self, value):
        raise ValueError("Duplicated timeseries")

    monkeypatch.setattr(Histogram, "observe", broken)
    assert (await served_whole(engine, request("r"))).usage.completion_tokens == 5
    found = scrape(port)
    assert found["jserve:request_success_total{length}"] == 1 and found["jserve:requests_failed_total"] == 0
    said = [record.message for record in caplog.records if "a metric cannot be recorded" in record.message]
    assert 1 <= len(said) <= len(HISTOGRAMS), "once a metric, not at every step"


async def test_the_last_message_tells_the_requests_own_times(served):
    engine, _ = served
    one = (await asyncio.gather(*(served_whole(engine, request(f"r{n}", 6, 20)) for n in range(6))))[-1]
    times = one.metrics
    assert times.arrival <= times.first_scheduled <= times.first_token <= times.last_token
    assert times.queue_s == times.first_scheduled - times.arrival and times.num_preemptions == 0


def test_the_dashboard_is_what_its_tool_writes():
    from tools.make_dashboard import dashboard

    assert json.loads(DASHBOARD.read_text()) == dashboard()
