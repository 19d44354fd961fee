"""One load at several rates or concurrencies: the latency-throughput curve, and the highest point within an SLO."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

SLOS = {
    "mlperf-8b-server": {"ttft": 2000.0, "tpot": 100.0},
    "mlperf-8b-interactive": {"ttft": 500.0, "tpot": 30.0},
}
"""P99 limits in ms; the presets are those of MLPerf Inference for Llama-3.1-8B."""
KINDS = ("rate", "concurrency")
MAX_DOUBLINGS = 10


@dataclass(frozen=True)
class Sweep:
    kind: str
    """rate or concurrency."""
    points: tuple[float, ...] | None
    """None: doubled from 1 until the SLO is missed, then halved between."""
    slo_ms: Mapping[str, float] | None = None
    num_halvings: int = 3


def keeps_slo(figures: Mapping[str, object], slo_ms: Mapping[str, float]) -> bool:
    """Whether P99 of each metric is within its limit, and nothing failed."""
    if figures["failed"] or figures.get("stopped"):
        return False
    values = {metric: figures.get(f"p99_{metric}_ms") for metric in slo_ms}
    return all(value is not None and value <= slo_ms[metric] for metric, value in values.items())


async def run(
    sweep: Sweep, measure: Callable[[float], Awaitable[dict[str, object]]]
) -> tuple[list[dict[str, object]], dict[str, object] | None]:
    """(points in order, the best one within the SLO).  `measure(value)` gives the report at a rate or concurrency."""
    found: dict[float, dict[str, object]] = {}

    async def keeps(value: float) -> bool:
        if value not in found:
            found[value] = {sweep.kind: value, **await measure(value)}
        return sweep.slo_ms is None or keeps_slo(found[value], sweep.slo_ms)

    if sweep.points is not None:
        for value in sweep.points:
            await keeps(value)
    else:
        await _search(sweep, keeps)
    points = [found[value] for value in sorted(found)]
    within = [one for one in points if sweep.slo_ms is not None and keeps_slo(one, sweep.slo_ms)]
    return points, within[-1] if within else None


async def _search(sweep: Sweep, keeps: Callable[[float], Awaitable[bool]]) -> None:
    below, above = 0.0, 1.0
    for _ in range(MAX_DOUBLINGS):
        if not await keeps(above):
            break
        below, above = above, 2 * above
    else:
        return
    for _ in range(sweep.num_halvings):
        middle = (below + above) / 2
        if sweep.kind == "concurrency":
            middle = float(int(middle))
        if middle in (below, above) or middle < 1 and sweep.kind == "concurrency":
            return
        below, above = (middle, above) if await keeps(middle) else (below, middle)


COLUMNS = (
    ("output tok/s", "output_throughput", "{:.1f}"),
    ("req/s", "request_throughput", "{:.2f}"),
    ("goodput", "request_goodput", "{:.2f}"),
    ("TTFT p50", "median_ttft_ms", "{:.0f}"),
    ("TTFT p99", "p99_ttft_ms", "{:.0f}"),
    ("TPOT p50", "median_tpot_ms", "{:.1f}"),
    ("TPOT p99", "p99_tpot_ms", "{:.1f}"),
    ("failed", "failed", "{}"),
)


def table(sweep: Sweep, points: Sequence[Mapping[str, object]], best: Mapping[str, object] | None) -> str:
    columns = [column for column in COLUMNS if any(point.get(column[1]) is not None for point in points)]
    lines = [f"{sweep.kind:>12}" + "".join(f"{label:>14}" for label, _, _ in columns) + "   (times in ms)"]
    for point in points:
        values = ("-" if point.get(key) is None else form.format(point[key]) for _, key, form in columns)
        mark = ""
        if sweep.slo_ms is not None:
            mark = "   within the SLO" if keeps_slo(point, sweep.slo_ms) else "   misses it"
        lines.append(f"{point[sweep.kind]:>12g}" + "".join(f"{value:>14}" for value in values) + mark)
    if sweep.slo_ms is not None:
        limits = ", ".join(f"P99 {metric} <= {ms:g} ms" for metric, ms in sweep.slo_ms.items())
        highest = "none" if best is None else f"{best[sweep.kind]:g} ({best['output_throughput']:.1f} output tokens/s)"
        lines.append(f"highest {sweep.kind} within the SLO ({limits}): {highest}")
    return "\n".join(lines)
