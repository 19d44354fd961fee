"""One report for every mode of `jserve bench`: from what a client saw of each request to figures, text and JSON.

Names and labels are those of `vllm bench serve`, so that dashboards and parsers carry over.  Rules: tokens are counted
by id, never by message; a message with k tokens after a gap g counts as k tokens g / k apart, and tokens that come with
the first one as 0 apart, so that the mean ITL of one request is its TPOT; percentiles interpolate linearly (p50 of
1, 2, 3, 4 is 2.5) and are taken over completed requests only.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SCHEMA = "jserve-bench-1"

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}


@dataclass(frozen=True)
class RequestRecord:
    """What a client saw of one request.  Times are seconds of one monotonic clock."""

    prompt_tokens: int
    start: float
    arrivals: tuple[tuple[float, int], ...]
    """(time, number of token ids) of each message that carried any."""
    end: float
    cached_tokens: int = 0
    error: str | None = None
    """None: completed.  Otherwise a gRPC code's name, `empty` (no token), `cut` (no finish_reason) or `stalled`."""
    token_ids: tuple[int, ...] = ()
    """The output, where the server tells ids."""
    due: float | None = None
    """When an open loop wanted it sent."""
    queue_s: float | None = None
    """Seconds that it waited in the server, where the server tells."""

    @property
    def output_tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def ttft(self) -> float:
        return self.arrivals[0][0] - self.start

    @property
    def e2el(self) -> float:
        return self.arrivals[-1][0] - self.start

    @property
    def tpot(self) -> float | None:
        """None for an output of one token, which has no second one to wait for."""
        if self.output_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        gaps = [0.0] * (self.arrivals[0][1] - 1)
        for (before, _), (now, count) in itertools.pairwise(self.arrivals):
            gaps += [(now - before) / count] * count
        return gaps


def summarize(
    records: Sequence[RequestRecord], percentiles: Sequence[float] = (99,), goodput: Mapping[str, float] | None = None
) -> dict[str, object]:
    """The figures of one run.  `duration` is from the first start to the last end, failures included.

    Args:
      goodput: targets in ms by metric; requests that keep all of them are counted apart.
    """
    done = [record for record in records if record.error is None]
    begin = min((record.start for record in records), default=0.0)
    duration = max((record.end for record in records), default=0.0) - begin
    num_input, num_output = sum(r.prompt_tokens for r in done), sum(r.output_tokens for r in done)
    num_cached = sum(record.cached_tokens for record in done)
    figures: dict[str, object] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(records) - len(done),
        "errors": dict(Counter(record.error for record in records if record.error is not None)),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": _rate(len(done), duration),
        "output_throughput": _rate(num_output, duration),
        "total_token_throughput": _rate(num_input + num_output, duration),
        "max_output_tokens_per_s": _peak_rate(done, begin, duration),
        "max_concurrent_requests": _peak_concurrency(records),
        "cached_tokens": num_cached,
        "cached_token_share": num_cached / num_input if num_input else 0.0,
    }
    samples = {
        "ttft": [record.ttft for record in done],
        "tpot": [record.tpot for record in done if record.tpot is not None],
        "itl": [gap for record in done for gap in record.itls],
        "e2el": [record.e2el for record in done],
    }
    for metric, seconds in samples.items():
        figures |= _statistics(metric, seconds, percentiles)
    queues = [record.queue_s for record in done if record.queue_s is not None]
    if queues:
        figures["mean_queue_ms"] = 1e3 * float(np.mean(queues))
    if goodput:
        num_good = sum(keeps(record, goodput) for record in done)
        figures |= {
            "request_goodput": _rate(num_good, duration),
            "good_requests": num_good,
            "goodput_targets_ms": dict(goodput),
        }
    return figures


def keeps(record: RequestRecord, targets_ms: Mapping[str, float]) -> bool:
    """Whether a completed request keeps every target; of its gaps, each one has to."""
    for metric, target in targets_ms.items():
        value = max(record.itls, default=0.0) if metric == "itl" else getattr(record, metric)
        if value is not None and 1e3 * value > target:
            return False
    return True


def details(records: Sequence[RequestRecord]) -> dict[str, object]:
    """Per-request lists, in order, as vLLM's --save-detailed; 0 and empty where a request failed."""
    done = [record if record.error is None else None for record in records]
    return {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.output_tokens for record in records],
        "start_times": [record.start for record in records],
        "ttfts": [record.ttft if record else 0.0 for record in done],
        "itls": [record.itls if record else [] for record in done],
        "latencies": [record.e2el if record else 0.0 for record in done],
        "output_token_ids": [list(record.token_ids) for record in records],
        "request_errors": [record.error or "" for record in records],
    }


def header(mode: str, **about: object) -> dict[str, object]:
    """What every report begins with: schema, mode, date, versions; `about` adds model_id, load and settings."""
    from jserve import __version__

    return {
        "schema": SCHEMA,
        "mode": mode,
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": "jserve",
        "jserve_version": __version__,
        **about,
    }


def render(
    report: Mapping[str, object], percentiles: Sequence[float] = (99,), metrics: Sequence[str] = tuple(METRICS)
) -> str:
    """The report as a person reads it, with the labels of `vllm bench serve`."""
    title = {"throughput": "Throughput", "latency": "Latency"}.get(str(report["mode"]), "Serving")
    lines = [f"{f' {title} Benchmark Result ':=^50}"]
    for label, key, form in (
        ("Successful requests:", "completed", "{}"),
        ("Failed requests:", "failed", "{}"),
        ("Not sent:", "not_sent", "{}"),
        ("Maximum request concurrency:", "max_concurrency", "{}"),
        ("Request rate configured (RPS):", "request_rate", "{}"),
        ("Benchmark duration (s):", "duration", "{:.2f}"),
        ("Total input tokens:", "total_input_tokens", "{}"),
        ("Total generated tokens:", "total_output_tokens", "{}"),
        ("Request throughput (req/s):", "request_throughput", "{:.2f}"),
        ("Request goodput (req/s):", "request_goodput", "{:.2f}"),
        ("Output token throughput (tok/s):", "output_throughput", "{:.2f}"),
        ("Peak output token throughput (tok/s):", "max_output_tokens_per_s", "{:.2f}"),
        ("Peak concurrent requests:", "max_concurrent_requests", "{}"),
        ("Total token throughput (tok/s):", "total_token_throughput", "{:.2f}"),
        ("Cached share of input tokens (%):", "cached_token_share", "{:.1%}"),
        ("Padded share of computed tokens (%):", "padded_token_share", "{:.1%}"),
        ("Prefix cache hit rate (%):", "prefix_cache_hit_rate", "{:.1%}"),
        ("Preemptions:", "num_preemptions", "{}"),
        ("Compiles after ready:", "compiles_after_ready", "{}"),
    ):
        if report.get(key) is not None:
            lines.append(f"{label:<40} {form.format(report[key]).rstrip('%'):<10}".rstrip())
    if report.get("stopped"):
        lines.append(f"Stopped early: {report['stopped']}")
    for error, count in dict(report.get("errors") or {}).items():
        lines.append(f"{f'  failed with {error}:':<40} {count}")
    for metric in metrics:
        short, long = METRICS[metric]
        lines.append(f"{long:-^50}")
        names = ["mean", "median", *(_percentile_name(p) for p in percentiles), "max"]
        for name in names:
            value = report.get(f"{name}_{metric}_ms")
            shown = "-" if value is None else f"{value:.2f}"
            lines.append(f"{f'{name.capitalize()} {short} (ms):':<40} {shown:<10}".rstrip())
    lines.append("=" * 50)
    return "\n".join(lines)


def save(report: Mapping[str, object], folder: str | Path, name: str | None = None) -> Path:
    """Writes the report as JSON into `folder` under a name of its own, unless one is given; returns the path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if name is not None:
        (folder / name).write_text(json.dumps(report, indent=1) + "\n")
        return folder / name
    model = str(report.get("model_id", "model")).rstrip("/").split("/")[-1]
    path = folder / f"{report['backend']}-{report['mode']}-{model}-{report['date']}.json"
    number = 2
    while path.exists():
        path = path.with_name(f"{path.stem.split('.')[0]}.{number}.json")
        number += 1
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path


def _statistics(metric: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    names = ["mean", "median", "std", "max", *(_percentile_name(p) for p in percentiles)]
    if not seconds:
        return {f"{name}_{metric}_ms": None for name in names}
    values = np.asarray(seconds) * 1e3
    numbers = [values.mean(), np.median(values), values.std(), values.max(), *np.percentile(values, percentiles)]
    return {f"{name}_{metric}_ms": float(number) for name, number in zip(names, numbers, strict=True)}


def _percentile_name(percentile: float) -> str:
    return f"p{int(percentile)}" if percentile == int(percentile) else f"p{percentile}"


def _rate(count: int, duration: float) -> float:
    return count / duration if duration > 0 else 0.0


def _peak_rate(records: Sequence[RequestRecord], begin: float, duration: float) -> float:
    """Tokens a second in the best of k equal parts of the run, each a second or a little longer; at least the mean."""
    if duration <= 0:
        return 0.0
    num_parts = max(1, math.floor(duration))
    parts = np.zeros(num_parts)
    for record in records:
        for at, count in record.arrivals:
            parts[min(num_parts - 1, int((at - begin) / duration * num_parts))] += count
    return float(parts.max() * num_parts / duration)


def _peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """Most requests open at one time; one that ends when another starts does not overlap it."""
    edges = sorted([(record.start, 1) for record in records] + [(record.end, -1) for record in records])
    peak = now = 0
    for _, step in edges:
        now += step
        peak = max(peak, now)
    return peak
