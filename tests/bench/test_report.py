"""Figures of requests whose times are known: exact, by the rules in the module's docstring."""

import json

import pytest

from jserve.bench import report
from jserve.bench.report import RequestRecord


def record(*arrivals, start=0.0, prompt_tokens=10, **more) -> RequestRecord:
    end = arrivals[-1][0] if arrivals else start
    return RequestRecord(prompt_tokens, start, tuple(arrivals), more.pop("end", end), **more)


def test_tokens_are_counted_by_id_and_not_by_message():
    """3 tokens at 100 ms, then 4 every 40 ms."""
    one = record((0.1, 3), (0.14, 4), (0.18, 4))
    figures = report.summarize([one], [99])
    assert figures["total_output_tokens"] == 11
    assert figures["mean_ttft_ms"] == pytest.approx(100)
    assert figures["mean_tpot_ms"] == pytest.approx(80 / 10)
    assert figures["mean_itl_ms"] == pytest.approx(80 / 10), "the mean ITL of one request is its TPOT"
    assert sorted(one.itls) == pytest.approx([0, 0] + [0.01] * 8)
    assert figures["mean_e2el_ms"] == pytest.approx(180)


def test_percentiles_interpolate():
    records = [record((ms / 1e3, 1), start=0.0) for ms in (1, 2, 3, 4)]
    figures = report.summarize(records, [50, 99, 99.9])
    assert figures["median_ttft_ms"] == figures["p50_ttft_ms"] == pytest.approx(2.5)
    assert figures["p99_ttft_ms"] == pytest.approx(3.97)
    assert figures["p99.9_ttft_ms"] == pytest.approx(3.997)
    assert figures["max_ttft_ms"] == pytest.approx(4)


def test_throughput_is_over_the_whole_run():
    records = [record((1.0, 5), start=0.5, prompt_tokens=3), record((2.0, 5), (4.5, 15), start=1.0, prompt_tokens=7)]
    figures = report.summarize(records)
    assert figures["duration"] == pytest.approx(4.0)
    assert figures["request_throughput"] == pytest.approx(2 / 4)
    assert figures["output_throughput"] == pytest.approx(25 / 4)
    assert figures["total_token_throughput"] == pytest.approx(35 / 4)
    assert figures["max_concurrent_requests"] == 1, "the second starts when the first ends"


def test_failures_are_counted_apart_and_stay_out_of_the_figures():
    records = [
        record((1.0, 2)),
        record((0.5, 1), error="cut"),
        record(error="empty"),
        record(error="RESOURCE_EXHAUSTED", end=2.0),
        record(error="RESOURCE_EXHAUSTED"),
    ]
    figures = report.summarize(records)
    assert (figures["completed"], figures["failed"]) == (1, 4)
    assert figures["errors"] == {"cut": 1, "empty": 1, "RESOURCE_EXHAUSTED": 2}
    assert figures["total_output_tokens"] == 2 and figures["total_input_tokens"] == 10
    assert figures["mean_ttft_ms"] == pytest.approx(1000)
    assert figures["duration"] == pytest.approx(2.0), "real wall time, failures included"


def test_a_run_without_a_success_has_no_latencies():
    figures = report.summarize([record(error="UNAVAILABLE")])
    assert figures["completed"] == 0 and figures["mean_ttft_ms"] is None and figures["output_throughput"] == 0
    assert "Mean TTFT (ms):" in report.render(report.header("throughput") | figures)
    json.dumps(figures)


def test_one_token_outputs_have_no_tpot():
    figures = report.summarize([record((0.1, 1)), record((0.1, 1), (0.3, 1))])
    assert figures["mean_tpot_ms"] == pytest.approx(200)


def test_the_peak_is_at_least_the_mean():
    for duration in (0.3, 1.0, 1.5, 2.7):
        one = record((0.0, 1), (duration, 9))
        figures = report.summarize([one])
        assert figures["max_output_tokens_per_s"] >= figures["output_throughput"] - 1e-9


def test_cached_share():
    records = [record((0.1, 1), cached_tokens=0), record((0.1, 1), cached_tokens=5)]
    assert report.summarize(records)["cached_token_share"] == pytest.approx(0.25)


def test_rendering_has_the_labels_that_parsers_look_for():
    figures = report.header("throughput", max_concurrency=8) | report.summarize([record((0.1, 1), (0.2, 1))])
    text = report.render(figures)
    for label in (
        "Successful requests:",
        "Benchmark duration (s):",
        "Total generated tokens:",
        "Output token throughput (tok/s):",
        "Total token throughput (tok/s):",
        "Peak output token throughput (tok/s):",
        "Peak concurrent requests:",
        "Mean TTFT (ms):",
        "Median TPOT (ms):",
        "P99 ITL (ms):",
        "Max E2EL (ms):",
        "Time per Output Token (excl. 1st token)",
    ):
        assert label in text
    assert "TPOT" not in report.render(figures, metrics=["ttft"])


def test_saved_reports_are_json_and_never_overwrite(tmp_path):
    figures = report.header("latency", model_id="org/some.model") | report.summarize([record((0.1, 1))])
    paths = {report.save(figures, tmp_path / "results") for _ in range(3)}
    assert len(paths) == 3
    for path in paths:
        assert json.loads(path.read_text())["schema"] == report.SCHEMA


def test_details_are_lists_by_request():
    details = report.details([record((0.1, 2), (0.3, 1)), record(error="empty")])
    assert details["output_lens"] == [3, 0] and details["ttfts"] == [0.1, 0.0]
    assert details["latencies"] == [0.3, 0.0] and details["start_times"] == [0.0, 0.0]
    assert details["itls"] == [pytest.approx([0.0, 0.2]), []] and details["request_errors"] == ["", "empty"]
