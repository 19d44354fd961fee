"""The driver on a clock of its own: what the client measures of a scripted server comes out exact."""

from __future__ import annotations

import asyncio

import pytest

from jserve.bench import driver, lag, report
from jserve.bench.arrivals import Ramp, arrival_times
from jserve.bench.driver import Conversation, Piece, counted, drive
from jserve.bench.serve import Pace
from jserve.request import Code, GenerateRequest, RequestError, Usage
from tests.support.virtual_time import run_virtually

M1 = ((0.1, 3), (0.04, 4), (0.0, 0), (0.04, 4))
"""First 3 tokens at 100 ms, then 4 every 40 ms, an empty message in between."""


class ScriptedServer:
    """Streams (delay, tokens) of the script that `pick(number of the request)` gives; an exception in it is raised."""

    def __init__(self, pick=lambda number: M1, num_cached=0):
        self.pick, self.num_cached = pick, num_cached
        self.sent: list[tuple[float, GenerateRequest]] = []
        self.open = self.most_open = 0

    async def __call__(self, request):
        script = self.pick(len(self.sent))
        self.sent.append((asyncio.get_running_loop().time(), request))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            total = 0
            for step in script:
                if isinstance(step, BaseException):
                    raise step
                delay, count = step
                await asyncio.sleep(delay)
                total += count
                yield Piece(count, [7] * count)
            yield Piece(0, finished=True, usage=Usage(len(request.prompt_token_ids), total, self.num_cached))
        finally:
            self.open -= 1


def requests(count, length=5):
    return [GenerateRequest(prompt_token_ids=[number] * length) for number in range(count)]


def talk(*turns, start_s=None):
    return Conversation(tuple(turns), start_s)


@pytest.fixture
def driven(monkeypatch):
    def run(server, conversations, **options):
        return run_virtually(drive(server, conversations, **options), monkeypatch, driver, lag)

    return run


def test_every_figure_of_a_known_schedule_is_exact(driven):
    outcome = driven(ScriptedServer(), [talk(one) for one in requests(10)], concurrency=2)
    figures = report.summarize(outcome.records, (50, 99), {"ttft": 100.001, "tpot": 8.001})
    assert figures["mean_ttft_ms"] == figures["p99_ttft_ms"] == pytest.approx(100, abs=1e-6)
    assert (figures["mean_tpot_ms"], figures["mean_itl_ms"]) == pytest.approx((8, 8), abs=1e-6)
    assert (figures["p50_itl_ms"], figures["p99_itl_ms"]) == pytest.approx((10, 10), abs=1e-6)
    assert figures["mean_e2el_ms"] == pytest.approx(180, abs=1e-6)
    assert figures["total_output_tokens"] == 110 and figures["duration"] == pytest.approx(5 * 0.18)
    assert figures["max_output_tokens_per_s"] >= figures["output_throughput"] == pytest.approx(110 / 0.9)
    assert figures["good_requests"] == 10 and figures["max_concurrent_requests"] == 2


def test_goodput_counts_the_requests_that_keep_every_limit(driven):
    slow_start, slow_gap = ((0.3, 1), (0.01, 1)), ((0.1, 1), (0.2, 1))
    pick = lambda number: (M1, slow_start, slow_gap)[number % 3]
    records = driven(ScriptedServer(pick), [talk(one) for one in requests(9)], concurrency=1).records
    assert report.summarize(records, goodput={"ttft": 200, "tpot": 50})["good_requests"] == 3
    assert report.summarize(records, goodput={"ttft": 200})["good_requests"] == 6
    figures = report.summarize(records, goodput={"itl": 50})
    assert figures["request_goodput"] == pytest.approx(6 / figures["duration"])


def test_failures_are_counted_by_kind_and_stay_out_of_the_percentiles(driven):
    """A tenth empty, a tenth cut, a tenth refused."""
    full = RequestError(Code.RESOURCE_EXHAUSTED, "full")
    lost = RequestError(Code.UNAVAILABLE, "reset")
    scripts = {0: (), 1: ((0.5, 2), lost), 2: (full,)}
    pick = lambda number: scripts.get(number % 10, M1)
    outcome = driven(ScriptedServer(pick), [talk(one) for one in requests(100)], concurrency=5)
    figures = report.summarize(outcome.records)
    assert figures["errors"] == {"empty": 10, "UNAVAILABLE": 10, "RESOURCE_EXHAUSTED": 10}
    assert (figures["completed"], figures["failed"]) == (70, 30)
    assert figures["total_output_tokens"] == 70 * 11, "tokens of cut streams are no throughput"
    assert figures["max_ttft_ms"] == pytest.approx(100, abs=1e-6)


def test_an_open_loop_sends_on_time_whatever_the_server_does(driven):
    slow = ScriptedServer(lambda number: ((30.0, 1),))
    times = arrival_times(50, 10.0, 1.0, 3)
    outcome = driven(slow, [talk(one, start_s=float(at)) for one, at in zip(requests(50), times)])
    assert [at - slow.sent[0][0] for at, _ in slow.sent] == pytest.approx(list(times), abs=1e-9)
    assert slow.most_open > 30 and lag.figures([outcome.lag])["p99_send_lag_ms"] == pytest.approx(0, abs=1e-6)


def test_a_limit_holds_back_an_open_loop_and_the_lateness_shows(driven):
    slow = ScriptedServer(lambda number: ((1.0, 1),))
    outcome = driven(slow, [talk(one, start_s=0.1 * at) for at, one in enumerate(requests(20))], concurrency=2)
    assert slow.most_open == 2
    assert lag.figures([outcome.lag])["p99_send_lag_ms"] > 5000


def test_a_later_turn_holds_all_that_was_said(driven):
    server = ScriptedServer(lambda number: ((0.1, 2),))
    first, second, third = (GenerateRequest(prompt_token_ids=ids) for ids in ([1, 2], [3], [4]))
    outcome = driven(server, [talk(first, second, third)])
    prompts = [list(request.prompt_token_ids) for _, request in server.sent]
    assert prompts == [[1, 2], [1, 2, 7, 7, 3], [1, 2, 7, 7, 3, 7, 7, 4]]
    assert [record.prompt_tokens for record in outcome.records] == [2, 5, 8]


def test_a_server_that_is_gone_ends_the_run_with_a_report(driven):
    lost = RequestError(Code.UNAVAILABLE, "refused")
    server = ScriptedServer(lambda number: M1 if number < 20 else (lost,))
    outcome = driven(server, [talk(one, start_s=float(at)) for at, one in enumerate(requests(1000))])
    assert len(outcome.records) == 30 and outcome.not_sent == 970
    assert outcome.stopped.startswith("no server") and len(server.sent) == 30
    assert report.summarize(outcome.records)["errors"] == {"UNAVAILABLE": 10}


def test_a_server_that_falls_silent_ends_the_run_with_a_report(driven):
    forever = ((0.1, 1), (1e9, 1))
    server = ScriptedServer(lambda number: M1 if number < 3 else forever)
    outcome = driven(server, [talk(one) for one in requests(50)], concurrency=4, stall_timeout_s=20.0)
    figures = report.summarize(outcome.records)
    assert (figures["completed"], figures["errors"]) == (3, {"stalled": 4})
    assert outcome.not_sent == 43 and outcome.stopped.startswith("stalled")
    assert figures["duration"] < 30 and server.open == 0


def test_a_slow_server_is_not_taken_for_a_silent_one(driven):
    slow = ScriptedServer(lambda number: ((15.0, 1), (15.0, 1)))
    outcome = driven(slow, [talk(one) for one in requests(3)], concurrency=1, stall_timeout_s=20.0)
    assert outcome.stopped is None and not any(record.error for record in outcome.records)


def test_messages_that_do_not_say_how_many_tokens_share_the_usage_exactly():
    assert counted([(1.0, None, 4), (2.0, None, 8)], 9) == ((1.0, 3), (2.0, 6))
    assert sum(count for _, count in counted([(float(at), None, 1 + at % 3) for at in range(7)], 40)) == 40
    assert counted([(1.0, None, 1), (2.0, None, 1), (3.0, None, 1)], 2) == ((1.0, 1), (2.0, 1))
    assert counted([(1.0, None, 9), (2.0, None, 1)], None) == ((1.0, 1), (2.0, 1))
    assert counted([(1.0, 3, 0), (2.0, 4, 0)], 99) == ((1.0, 3), (2.0, 4)), "ids are believed before usage"


def test_a_late_client_is_told_from_a_slow_server():
    def figures(**client):
        return {"median_tpot_ms": 40.0, "max_concurrency": None, "client": {
            "max_cpu_share": 0.3, "p99_wake_lag_ms": 2.0, "p99_send_lag_ms": 1.0, **client}}

    assert lag.bottleneck(figures()) is None
    assert "core" in lag.bottleneck(figures(max_cpu_share=0.97))
    assert "30.0 ms late" in lag.bottleneck(figures(p99_wake_lag_ms=30.0))
    assert lag.bottleneck(figures(p99_wake_lag_ms=30.0), 31.0) is None
    assert "sent requests" in lag.bottleneck(figures(p99_send_lag_ms=80.0))
    assert lag.bottleneck({**figures(p99_wake_lag_ms=30.0), "median_tpot_ms": 400.0}) is None


async def test_a_blocked_client_notices_by_itself():
    import time

    meter = lag.LagMeter()
    ticking = asyncio.ensure_future(meter.run())
    for _ in range(5):
        await asyncio.sleep(0.03)
        time.sleep(0.1)
    ticking.cancel()
    assert lag.figures([meter.lag()])["p99_wake_lag_ms"] > 60


def test_rates_rise_as_told_and_gaps_are_gamma():
    linear = arrival_times(4000, 1.0, 1.0, 0, Ramp("linear", 1.0, 9.0))
    assert 4000 / linear[-1] == pytest.approx(8 / 2.1972, rel=0.1), "the mean gap is ln(9) / 8"
    rates = Ramp("exponential", 1.0, 16.0).rates(5)
    assert list(rates) == pytest.approx([1, 2, 4, 8, 16])
    timed = Pace(request_rate=5.0).timed([talk(one) for one in requests(10)], 1)
    assert timed == Pace(request_rate=5.0).timed([talk(one) for one in requests(10)], 1)
    assert timed != Pace(request_rate=5.0).timed([talk(one) for one in requests(10)], 2)
    own = Pace(request_rate=5.0).timed([talk(one, start_s=3.0) for one in requests(2)], 1)
    assert [one.start_s for one in own] == [3.0, 3.0], "a trace keeps its times"
