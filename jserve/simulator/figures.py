"""A run's figures in the bench's schema, and the few that only a simulation knows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jserve.bench import report
from jserve.simulator.clock import Run
from jserve.simulator.workload import StallLoad

COMPARED = (
    # label, key, form
    ("Completed", "completed", "{:,}"),
    ("Failed", "failed", "{:,}"),
    ("Duration (s)", "duration", "{:,.2f}"),
    ("Steps", "num_steps", "{:,}"),
    ("Rows in use (%)", "row_share", "{:.1%}"),
    ("Tokens a step, mean", "mean_tokens_per_step", "{:,.1f}"),
    ("Tokens a step, deviation", "std_tokens_per_step", "{:,.1f}"),
    ("Padded share (%)", "padded_token_share", "{:.1%}"),
    ("Output tokens/s", "output_throughput", "{:,.1f}"),
    ("All tokens/s", "total_token_throughput", "{:,.1f}"),
    ("Goodput (req/s)", "request_goodput", "{:,.2f}"),
    ("Median queueing (ms)", "median_queue_ms", "{:,.1f}"),
    ("Mean TTFT (ms)", "mean_ttft_ms", "{:,.1f}"),
    ("P99 TTFT (ms)", "p99_ttft_ms", "{:,.1f}"),
    ("Median ITL (ms)", "median_itl_ms", "{:,.2f}"),
    ("P99 ITL (ms)", "p99_itl_ms", "{:,.2f}"),
    ("Max ITL (ms)", "max_itl_ms", "{:,.2f}"),
    ("P99 ITL of the streams (ms)", "p99_stream_itl_ms", "{:,.2f}"),
    ("P99 ITL during prefills (ms)", "p99_stream_itl_during_prefill_ms", "{:,.2f}"),
    ("Stalls among gaps (%)", "stall_share", "{:.2%}"),
    ("Useful places (%)", "useful_place_share", "{:.2%}"),
    ("Request E starts at step", "first_step_of_fifth", "{}"),
)


def figures(run: Run, percentiles: Sequence[float], goodput: dict[str, float] | None = None) -> dict[str, object]:
    """What `bench` reports of real requests, and steps, padding and queueing of the simulation."""
    records = run.records()
    waits = np.array([start - run.requests[number].arrival for number, start in run.starts.items()] or [0.0])
    useful, computed = np.array(run.step_useful or [0]), np.array(run.step_computed or [0])
    num_places = run.num_steps * run.num_rows
    return {
        **report.summarize(records, percentiles, goodput),
        "num_steps": run.num_steps,
        "num_rows": run.num_rows,
        "padded_token_share": 1 - run.useful_share,
        "row_share": sum(run.step_rows) / num_places if num_places else 0.0,
        "mean_tokens_per_step": float(useful.mean()),
        "std_tokens_per_step": float(useful.std()),
        "mean_computed_per_step": float(computed.mean()),
        "mean_step_ms": 1e3 * float(np.mean(run.step_seconds or [0.0])),
        "median_queue_ms": 1e3 * float(np.median(waits)),
        "p99_queue_ms": 1e3 * float(np.percentile(waits, 99)),
    }


def stall_figures(run: Run, load: StallLoad) -> dict[str, object]:
    """Gaps of the decoding streams once the long prompts come, and those while one of them is being computed."""
    streams = range(load.streams)
    gaps = run.gaps(streams, after=load.begin_s)
    spans = [
        (run.requests[n].arrival, times[0]) for n, times in run.token_times.items() if n >= load.streams
    ]
    during = []
    for number in streams:
        times = np.array(run.token_times.get(number, []))
        ends, lengths = times[1:], np.diff(times)
        for begin, end in spans:
            during.append(lengths[(ends > begin) & (ends - lengths < end)])
    during = np.concatenate(during) if during else np.zeros(0)
    ends = np.array(run.step_ends)
    inside = (ends > load.begin_s) & (ends <= load.end_s)
    tokens = np.array(run.step_useful)[inside].sum()
    return {
        "p99_stream_itl_ms": 1e3 * float(np.percentile(gaps, 99)),
        "p999_stream_itl_ms": 1e3 * float(np.percentile(gaps, 99.9)),
        "max_stream_itl_ms": 1e3 * float(gaps.max()),
        "p99_stream_itl_during_prefill_ms": 1e3 * float(np.percentile(during, 99)),
        "stall_share": float((gaps > 10 * np.median(gaps)).mean()),
        "total_token_throughput": float(tokens) / (load.end_s - load.begin_s),
        "output_throughput": len(gaps) / (load.end_s - load.begin_s),
    }


def comparison(answers: dict[str, dict[str, object]]) -> str:
    """The figures of the systems side by side."""
    lines = [" " * 32 + "".join(f"{name:>16}" for name in answers)]
    for label, key, form in COMPARED:
        values = [answer.get(key) for answer in answers.values()]
        if any(value is not None for value in values):
            shown = ["-" if value is None else form.format(value).rstrip("%") for value in values]
            lines.append(f"{label:<32}" + "".join(f"{text:>16}" for text in shown))
    return "\n".join(lines)
