"""The latency-throughput curves of a sweep: one SVG, by itself or on a page of HTML with the table.

Throughput to the right, P50 and P99 of TTFT and TPOT upwards; a point is labelled by its rate or concurrency.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from jserve.bench.plot import BLUE, ORANGE, RED
from jserve.bench.ticks import decades, round_ticks

WIDTH, HEIGHT = 1000, 380
PANEL, LEFT, TOP, BOTTOM = 410, 62, 74, 326
LOG_FROM = 8.0
"""Greatest over least latency from which on the axis is logarithmic: both ends of the curve can be read then."""
METRICS = (("ttft", "Time to first token"), ("tpot", "Time per output token"))
CURVES = (("median", "P50", ORANGE), ("p99", "P99", BLUE))
STYLE = "body{font:14px system-ui,sans-serif;margin:24px;color:#222} h1{font-size:20px}"

Points = Sequence[Mapping[str, object]]


def page(kind: str, points: Points, slo_ms: Mapping[str, float] | None, title: str, table: str) -> str:
    """HTML: the curves, and `table` below them."""
    return (
        f"<!doctype html><meta charset='utf-8'><title>{html.escape(title)}</title><style>{STYLE}</style>"
        f"{svg(kind, points, slo_ms, title)}<pre>{html.escape(table)}</pre>"
    )


def svg(kind: str, points: Points, slo_ms: Mapping[str, float] | None, title: str) -> str:
    """Both panels as one picture that stands by itself."""
    body = [f"<rect width='{WIDTH}' height='{HEIGHT}' fill='#fff' />", _text(16, 28, title, size=17, weight="bold")]
    for number, (metric, name) in enumerate(METRICS):
        left = LEFT + number * (PANEL + 80)
        body.append(_text(left, 56, f"{name} (ms)", size=14, weight="bold"))
        body += _panel(kind, points, metric, (slo_ms or {}).get(metric), left)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{HEIGHT}' viewBox='0 0 {WIDTH} {HEIGHT}' "
        f"font-family='system-ui, sans-serif'>{''.join(body)}</svg>\n"
    )


def _panel(kind: str, points: Points, metric: str, limit: float | None, left: int) -> list[str]:
    shown = [point for point in points if point.get(f"p99_{metric}_ms") is not None]
    if not shown:
        return [_text(left, TOP + 20, "nothing was completed")]
    values = [float(point[f"{of}_{metric}_ms"]) for point in shown for of, _, _ in CURVES] + ([limit] if limit else [])
    most_x = 1.08 * max(float(point["output_throughput"]) for point in shown) or 1.0
    low, high = max(min(values), 1e-3), max(*values, 2e-3)
    is_log = high / low >= LOG_FROM
    low, high = (low / 1.3, high * 1.3) if is_log else (0.0, high * 1.1)

    def x(rate: float) -> float:
        return left + rate / most_x * PANEL

    def y(ms: float) -> float:
        share = math.log(max(ms, low) / low) / math.log(high / low) if is_log else ms / high
        return BOTTOM - share * (BOTTOM - TOP)

    body = []
    for tick in decades(low, high) if is_log else round_ticks(high):
        body.append(_line(left, y(tick), left + PANEL, y(tick), "#e3e6ea"))
        body.append(_text(left - 6, y(tick) + 4, f"{tick:,g}", "end"))
    for tick in round_ticks(most_x):
        body.append(_line(x(tick), TOP, x(tick), BOTTOM, "#e3e6ea"))
        body.append(_text(x(tick), BOTTOM + 17, f"{tick:,g}", "middle"))
    scale = ", logarithmic upwards" if is_log else ""
    body.append(_text(left + PANEL / 2, BOTTOM + 37, f"output tokens/s{scale}; labels: {kind}", "middle"))
    if limit:
        body.append(_line(left, y(limit), left + PANEL, y(limit), RED, " stroke-width='1.5' stroke-dasharray='6 4'"))
        body.append(_text(left + 6, y(limit) - 5, f"P99 limit {limit:g} ms", colour=RED))
    for row, (of, name, colour) in enumerate(CURVES):
        spots = [(x(float(point["output_throughput"])), y(float(point[f"{of}_{metric}_ms"]))) for point in shown]
        along = " ".join(f"{a:.1f},{b:.1f}" for a, b in spots)
        body.append(f"<polyline points='{along}' fill='none' stroke='{colour}' stroke-width='2' />")
        body += [f"<circle cx='{a:.1f}' cy='{b:.1f}' r='4' fill='{colour}' />" for a, b in spots]
        body.append(_text(left + PANEL - 60 + 34 * row, 56, name, colour=colour, weight="bold"))
        if of == "p99":
            body += [_text(a - 3, b - 8, f"{point[kind]:g}", "end") for (a, b), point in zip(spots, shown)]
    return body


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "") -> str:
    return f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{colour}'{more} />"


def _text(
    x: float, y: float, text: str, anchor: str = "start", size: int = 12, weight: str = "normal", colour: str = "#333"
) -> str:
    about = f"text-anchor='{anchor}' font-size='{size}' font-weight='{weight}' fill='{colour}'"
    return f"<text x='{x:.1f}' y='{y:.1f}' {about}>{html.escape(text)}</text>"
