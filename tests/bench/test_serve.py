"""`bench serve` against scripted servers on real sockets: known delays come out within clock error, counts exact."""

from __future__ import annotations

import asyncio
import json
from xml.etree import ElementTree

import pytest

from jserve.bench import compare, plot, report, sweep, sweep_plot
from jserve.bench.driver import STALL_TIMEOUT_S, drive
from jserve.bench.load import JsonlLoad, Output, RandomLoad, SharedPrefixLoad, TraceLoad
from jserve.bench.serve import Options, Pace, run
from jserve.bench.target import Target, ask, stream_of
from jserve.bench.trace import TraceRow
from jserve.config import ConfigError
from jserve.request import Code, RequestError
from tests.support.auth import RED, auth_file
from tests.support.fake_engine import FakeEngine
from tests.support.grpc_server import server_process, serving
from tests.support.scripted import ScriptedEngine, openai_server
from tests.support.stand_in import stand_in_engine

M1 = ((0.1, 3), (0.04, 4), (0.0, 0), (0.04, 4))
CLOCK_MS = 60.0
"""How late even the luckiest message may be seen on a machine whose cores are busy.  That figures are exact is what
test_driver shows, on a clock that nobody disturbs."""
FULL = RequestError(Code.RESOURCE_EXHAUSTED, "full")


def is_scripted(records, ttft_ms: float = 100, e2el_ms: float = 180) -> bool:
    """No request is faster than its script, and the luckiest hardly slower."""
    ttft, e2el = [1e3 * record.ttft for record in records], [1e3 * record.e2el for record in records]
    fastest = ttft_ms - 1 <= min(ttft) and e2el_ms - 1 <= min(e2el)
    return fastest and min(ttft) <= ttft_ms + CLOCK_MS and min(e2el) <= e2el_ms + CLOCK_MS


async def test_known_delays_over_grpc():
    engine = ScriptedEngine(lambda number: M1, num_cached=4)
    async with serving(engine) as (server, _):
        figures, records = await run(
            Target("jserve", server.address), RandomLoad(20, 8, 11), Pace(max_concurrency=5),
            Options(num_warmups=3, goodput={"ttft": 60_000}),
        )
    assert (figures["completed"], figures["failed"], figures["total_output_tokens"]) == (20, 0, 220)
    assert engine.num_seen == 23 and figures["total_input_tokens"] == 160, "warm-ups are outside"
    assert is_scripted(records)
    assert figures["cached_token_share"] == 0.5 and figures["mean_queue_ms"] == pytest.approx(1)
    assert figures["max_concurrent_requests"] <= 5 and figures["max_concurrency"] == 5
    assert figures["model_id"] == "fake-model" and figures["backend"] == "jserve"
    assert figures["padded_token_share"] == pytest.approx(0.75), "from the server's own counters"
    assert figures["client"]["processes"] == 1 and 0 < figures["client"]["max_cpu_share"]
    assert figures["good_requests"] == 20
    assert set(records[0].token_ids) == {32}, "15 spaces would be one token if text were counted"
    assert len({tuple(request.prompt_token_ids) for request in engine.requests}) == 23
    assert all(not set(request.prompt_token_ids) & {1, 2, 256} for request in engine.requests)
    json.dumps(figures)


async def test_failures_over_grpc_are_counted_exactly_and_several_processes_share_the_load():
    scripts = {0: (), 1: ((0.01, 2), RuntimeError("broken")), 2: (FULL,)}
    engine = ScriptedEngine(lambda number: scripts.get(number % 10, ((0.01, 2), (0.01, 2))))
    async with serving(engine) as (server, _):
        figures, records = await run(
            Target("jserve", server.address), RandomLoad(40, 8, 4), Pace(request_rate=200.0),
            Options(num_warmups=0, num_processes=2),
        )
    assert figures["errors"] == {"empty": 4, "INTERNAL": 4, "RESOURCE_EXHAUSTED": 4}
    assert figures["completed"] == 28 and figures["total_output_tokens"] == 28 * 4
    assert figures["client"]["processes"] == 2 and len(records) == 40
    assert all(record.start >= record.due for record in records)


async def test_a_server_that_is_killed_in_the_middle_ends_the_bench_with_a_report():
    with server_process("--step-s", "0.05") as (process, address):
        target = Target("jserve", address)
        running = asyncio.ensure_future(run(
            target, RandomLoad(500, 8, 8), Pace(max_concurrency=4), Options(num_warmups=0),
            on_done=lambda error: process.kill() if error is None else None,
        ))
        figures, _ = await asyncio.wait_for(running, 30)
    assert figures["completed"] >= 1 and figures["stopped"].startswith("no server")
    assert figures["errors"]["UNAVAILABLE"] >= 10 and figures["not_sent"] > 400
    assert "Stopped early: no server" in report.render(figures)


async def test_nobody_at_the_address_is_one_error():
    for target in (Target("jserve", "127.0.0.1:1"), Target("openai", "http://127.0.0.1:1")):
        with pytest.raises(RequestError) as refusal:
            await ask(target)
        assert refusal.value.code is Code.UNAVAILABLE


@pytest.mark.parametrize("tells", ["ids", "running", "usage", "last"])
async def test_known_delays_of_an_openai_server(tells):
    async with openai_server(lambda number: M1, tells=tells, num_cached=2) as (url, bodies):
        figures, records = await run(
            Target("openai", url), RandomLoad(6, 8, 11), Pace(max_concurrency=3), Options(num_warmups=1)
        )
    assert (figures["completed"], figures["total_output_tokens"], figures["total_input_tokens"]) == (6, 66, 48)
    assert is_scripted(records)
    assert figures["cached_token_share"] == 0.25 and figures["model_id"] == "peer"
    assert figures["server_version"] == "9.9" and len(bodies) == 7
    assert bodies[0]["ignore_eos"] is True and bodies[0]["max_tokens"] == 11 and bodies[0]["temperature"] == 0.0
    assert len(bodies[0]["prompt"]) == 8 and bodies[0]["model"] == "peer"
    assert all(len(record.token_ids) == (11 if tells == "ids" else 0) for record in records)


async def test_a_kept_connection_that_its_server_gave_up_costs_no_request():
    async with openai_server(lambda number: ((0.0, 2),), answers_per_connection=1) as (url, bodies):
        target = Target("openai", url, "peer")
        figures, records = await run(target, RandomLoad(5, 8, 2), Pace(max_concurrency=1), Options(num_processes=1))
    assert (figures["completed"], figures["failed"]) == (5, 0)
    assert len(bodies) == 5 + Options().num_warmups  # none was answered twice


async def test_an_openai_server_that_cuts_or_refuses_is_counted():
    reset = ConnectionError()
    async with openai_server(lambda number: M1 if number % 2 else ((0.01, 2), reset)) as (url, _):
        async with stream_of(Target("openai", url, "peer")) as stream:
            load = RandomLoad(10, 8, 11, seed=1).conversations(range(5, 90))
            figures = report.summarize((await drive(stream, load, concurrency=1)).records)
    assert figures["completed"] == 5 and figures["errors"] == {"UNAVAILABLE": 5}
    async with openai_server(lambda number: M1, refuse=429) as (url, _):
        async with stream_of(Target("openai", url, "peer")) as stream:
            figures = report.summarize((await drive(stream, load, concurrency=1)).records)
    assert figures["errors"] == {"RESOURCE_EXHAUSTED": 10}


def test_shared_prefixes_are_shared_within_a_group_and_never_with_the_warm_up():
    load = SharedPrefixLoad(RandomLoad(12, 4, 3), num_groups=2, prefix_len=10, num_turns=2).checked(4096)
    conversations = load.conversations(range(100))
    assert [len(one.turns) for one in conversations] == [2] * 6
    prefixes = [tuple(one.turns[0].prompt_token_ids[:10]) for one in conversations]
    assert len(set(prefixes)) == 2 and prefixes[0] == prefixes[2] != prefixes[1]
    assert all(len(one.turns[0].prompt_token_ids) == 14 and len(one.turns[1].prompt_token_ids) == 4
               for one in conversations)
    warm = load.warm_ups(3, range(100))
    assert not {tuple(one.prompt_token_ids[:10]) for one in warm} & set(prefixes)
    other = SharedPrefixLoad(RandomLoad(12, 4, 3), 2, 10, 2).checked(4096).conversations(range(100))
    assert not set(prefixes) & {tuple(one.turns[0].prompt_token_ids[:10]) for one in other}
    with pytest.raises(ConfigError, match="can be 24 tokens"):
        load.checked(20)


def test_blocks_that_a_trace_calls_equal_are_equal():
    rows = (TraceRow(1100, 3, 0.0, (7, 8, 9)), TraceRow(1500, 4, 1.5, (7, 8, 2)), TraceRow(100, 5, 2.0, (7,)))
    first, second, third = TraceLoad(rows, "t", Output(), 1).checked(4096).conversations(range(1000))
    assert (first.start_s, second.start_s) == (0.0, 1.5)
    one, two = first.turns[0].prompt_token_ids, second.turns[0].prompt_token_ids
    assert len(one) == 1100 and len(two) == 1500 and one[:1024] == two[:1024] and one[1024:] != two[1024:1100]
    assert len(third.turns[0].prompt_token_ids) == 100
    assert JsonlLoad((first.turns[0],), "f").checked(None).conversations(())[0].turns[0] is first.turns[0]


async def scripted_sweep(plan, capacity=7.0):
    """A server whose P99 TTFT is 100 ms up to `capacity` and 5 s beyond."""
    asked = []

    async def measure(value):
        asked.append(value)
        ttft = 100.0 if value <= capacity else 5000.0
        return {
            "failed": 0, "median_ttft_ms": 90.0, "p99_ttft_ms": ttft, "median_tpot_ms": 19.0, "p99_tpot_ms": 20.0,
            "output_throughput": min(value, capacity) * 64,
        }

    return asked, *await sweep.run(plan, measure)


async def test_a_sweep_finds_the_highest_rate_within_the_slo():
    slo = sweep.SLOS["mlperf-8b-server"]
    asked, points, best = await scripted_sweep(sweep.Sweep("rate", None, slo))
    assert asked == [1, 2, 4, 8, 6, 7, 7.5] and best["rate"] == 7
    asked, points, best = await scripted_sweep(sweep.Sweep("concurrency", (2.0, 6.0, 9.0), slo))
    assert asked == [2, 6, 9] and best["concurrency"] == 6
    text = sweep.table(sweep.Sweep("concurrency", None, slo), points, best)
    assert "misses it" in text and "highest concurrency within the SLO (P99 ttft <= 2000 ms" in text
    page = sweep_plot.page("concurrency", points, slo, "t & t", text)
    assert "t &amp; t" in page and "misses it" in page
    picture = ElementTree.fromstring(sweep_plot.svg("concurrency", points, slo, "t & t"))
    texts = [node.text for node in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("9") == 2, "the point's concurrency, at both P99 curves"
    assert {"P50", "P99", "P99 limit 2000 ms", "2,000", "500"} <= set(texts), "5 s beside 90 ms: a logarithmic axis"
    assert "nothing was completed" in sweep_plot.svg("rate", [{"rate": 1.0, "p99_ttft_ms": None}], None, "t")
    _, _, none = await scripted_sweep(sweep.Sweep("rate", (8.0,), slo))
    assert none is None


async def test_the_page_shows_every_request(tmp_path):
    engine = FakeEngine(step_s=0.001)
    async with serving(engine) as (server, _):
        async with stream_of(Target("jserve", server.address)) as stream:
            load = RandomLoad(30, 8, 5, seed=2)
            outcome = await drive(stream, load.conversations(range(3, 250)), concurrency=6,
                                  stall_timeout_s=STALL_TIMEOUT_S)
    figures = report.header("serve", model_id="<m>") | report.summarize(outcome.records)
    plot.write_page(tmp_path / "p.html", figures, outcome.records)
    text = (tmp_path / "p.html").read_text()
    assert text.count("tokens in, 5 out") == 60, "a waiting and a generating part each"
    assert "&lt;m&gt;" in text and "http" not in text and text.count("<svg") == 4
    assert "<svg" in plot.page(figures, []), "also of a run without a request"


def test_two_reports_as_ratios(tmp_path):
    a = report.header("serve", max_concurrency=8, dtype="float32") | {"output_throughput": 100.0, "mean_ttft_ms": 50.0}
    b = {**a, "output_throughput": 150.0, "mean_ttft_ms": 25.0, "dtype": "int8", "failed": 0}
    for name, figures in (("a", a), ("b", b)):
        (tmp_path / f"{name}.json").write_text(json.dumps(figures))
    answer = compare.compare(compare.read(tmp_path / "a.json"), compare.read(tmp_path / "b.json"))
    assert [(row["key"], row["ratio"], row["b_is_better"]) for row in answer["ratios"]] == [
        ("output_throughput", 1.5, True), ("mean_ttft_ms", 0.5, True)
    ]
    assert answer["differing"] == {"dtype": ("float32", "int8")}
    assert "1.50x  better" in compare.render(answer)
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a report"):
        compare.read(tmp_path / "c.json")


async def test_the_same_load_over_grpc_and_over_our_own_http_gives_the_same_tokens():
    """Our HTTP refuses a field that it does not know, by name; the bench then does without it."""
    with stand_in_engine(max_num_seqs=8, num_blocks=400) as engine:
        async with serving(engine, http_port=0) as (server, _):
            found = {}
            for target in (Target("jserve", server.address), Target("openai", server.http_url, "stand-in")):
                async with stream_of(target) as stream:
                    load = RandomLoad(12, 9, 7, seed=5).conversations(range(5, 200))
                    found[target.backend] = (await drive(stream, load, concurrency=4)).records
    ours, http = found["jserve"], found["openai"]
    assert [record.error for record in (*ours, *http)] == [None] * 24
    assert [record.token_ids for record in ours] == [record.token_ids for record in http]
    assert {record.output_tokens for record in http} == {7} and {record.prompt_tokens for record in http} == {9}


async def test_a_second_run_finds_nothing_of_the_first_in_the_cache_unless_the_seed_says_so():
    """Nor does a run find its own warm-up there, and both the server and the client say what was found."""
    shares = {}
    with stand_in_engine(max_num_seqs=8, num_blocks=400) as engine:
        async with serving(engine) as (server, _):
            for name, seed in (("first", None), ("second", None), ("seeded", 5), ("again", 5)):
                load, options = RandomLoad(8, 33, 3, seed=seed), Options(num_warmups=4, num_processes=1)
                figures, _ = await run(Target("jserve", server.address), load, Pace(max_concurrency=4), options)
                shares[name] = figures["cached_token_share"], figures["prefix_cache_hit_rate"]
                assert figures["completed"] == 8 and figures["compiles_after_ready"] == 0
    assert shares["first"] == shares["second"] == shares["seeded"] == (0.0, 0.0)
    assert min(shares["again"]) > 0.5


async def test_a_server_that_wants_a_token_gets_it_over_grpc_and_http(tmp_path):
    with stand_in_engine() as engine:
        async with serving(engine, http_port=0, auth_file=auth_file(tmp_path)) as (server, _):
            ours = Target("jserve", server.address, token=RED)
            figures, _ = await run(ours, RandomLoad(3, 4, 2), Pace(max_concurrency=2))
            http = Target("openai", server.http_url, "stand-in", token=RED)
            async with stream_of(http) as stream:
                records = (await drive(stream, RandomLoad(3, 4, 2, seed=1).conversations(range(5, 99)))).records
            with pytest.raises(RequestError) as refusal:
                await ask(Target("jserve", server.address))
    assert figures["completed"] == 3 and figures["num_steps"] > 0
    assert [record.error for record in records] == [None] * 3
    assert refusal.value.code is Code.UNAUTHENTICATED
