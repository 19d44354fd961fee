"""One page of a run: tokens a second over time, how TTFT and ITL spread, and every request as a bar.

A file of HTML with inline SVG, nothing to install or fetch.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jserve.bench.report import RequestRecord
from jserve.bench.ticks import decades, round_ticks

WIDTH, LEFT, RIGHT = 1100, 70, 60
MAX_BARS = 400
"""Requests that are drawn; of more, every k-th."""
NUM_PARTS = 60
"""Of the time axis; at least a tenth of a second each."""
BLUE, PALE, RED, ORANGE = "#1f6fb2", "#a8cbe8", "#c0392b", "#d9822b"

STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 24px auto; color: #222; max-width: 1100px; }
h1 { font-size: 20px; margin: 0 0 2px; } h2 { font-size: 15px; margin: 26px 0 2px; }
p { margin: 2px 0 8px; color: #555; }
svg { display: block; background: #fafafa; } text { font: 11px system-ui, sans-serif; fill: #444; }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin: 14px 0; }
.tile { background: #f2f5f8; border-radius: 6px; padding: 8px 14px; } .tile b { display: block; font-size: 19px; }
.row { display: flex; gap: 20px; } .key { display: inline-block; width: 14px; height: 11px; margin: 0 4px 0 14px; }
"""

TILES = (
    # label, key, form
    ("output tokens/s", "output_throughput", "{:,.1f}"),
    ("requests/s", "request_throughput", "{:,.2f}"),
    ("good requests/s", "request_goodput", "{:,.2f}"),
    ("median TTFT", "median_ttft_ms", "{:,.0f} ms"),
    ("P99 TTFT", "p99_ttft_ms", "{:,.0f} ms"),
    ("median ITL", "median_itl_ms", "{:,.1f} ms"),
    ("P99 ITL", "p99_itl_ms", "{:,.1f} ms"),
    ("completed", "completed", "{:,}"),
    ("failed", "failed", "{:,}"),
    ("input cached", "cached_token_share", "{:.0%}"),
    ("padding", "padded_token_share", "{:.1%}"),
)


def write_page(path: str | Path, figures: Mapping[str, object], records: Sequence[RequestRecord]) -> None:
    Path(path).write_text(page(figures, records))


def page(figures: Mapping[str, object], records: Sequence[RequestRecord]) -> str:
    begin = min((record.start for record in records), default=0.0)
    end = max((record.end for record in records), default=1.0)
    done = [record for record in records if record.error is None]
    title = f"jserve bench {figures.get('mode', '')}: {figures.get('model_id', '')}"
    ttft = [1e3 * record.ttft for record in done]
    itl = [1e3 * gap for record in done for gap in record.itls]
    stopped = f"<p style='color:{RED}'>Stopped early: {html.escape(str(figures['stopped']))}</p>" if figures.get(
        "stopped") else ""
    return (
        f"<!doctype html><meta charset='utf-8'><title>{html.escape(title)}</title><style>{STYLE}</style>"
        f"<h1>{html.escape(title)}</h1><p>{html.escape(_subtitle(figures))}</p>{stopped}{_tiles(figures)}"
        "<h2>Output tokens a second, and requests that were open</h2>"
        f"<p>{_key(BLUE)}tokens/s{_key(ORANGE)}open requests</p>{_over_time(records, begin, end)}"
        f"<div class='row'><div><h2>Time to first token</h2>{_histogram(ttft, 'requests')}</div>"
        f"<div><h2>Time between tokens</h2>{_histogram(itl, 'gaps')}</div></div>"
        f"<h2>Requests</h2><p>One line a request, in the order in which they were sent."
        f"{_key(PALE)}waiting for the first token{_key(BLUE)}generating{_key(RED)}failed</p>"
        + _bars(records, begin, end)
    )


def _subtitle(figures: Mapping[str, object]) -> str:
    names = (
        "dataset_name", "num_prompts", "random_input_len", "random_output_len", "request_rate", "max_concurrency",
        "backend", "device", "dtype", "date",
    )
    return ", ".join(f"{name.replace('_', ' ')} {figures[name]}" for name in names if figures.get(name) is not None)


def _tiles(figures: Mapping[str, object]) -> str:
    shown = [
        f"<div class='tile'><b>{form.format(figures[key])}</b>{label}</div>"
        for label, key, form in TILES if figures.get(key) is not None
    ]
    return f"<div class='tiles'>{''.join(shown)}</div>"


def _key(colour: str) -> str:
    return f"<span class='key' style='background:{colour}'></span>"


def _over_time(records: Sequence[RequestRecord], begin: float, end: float) -> str:
    height, top = 190, 14
    span = max(1e-3, end - begin)
    count = max(1, min(NUM_PARTS, int(span / 0.1)))
    part = span / count
    tokens, opened = np.zeros(count), np.zeros(count)
    for record in records:
        for at, number in record.arrivals:
            tokens[min(count - 1, int((at - begin) / part))] += number
        for at in range(int((record.start - begin) / part), min(count - 1, int((record.end - begin) / part)) + 1):
            # the share of the part during which it was open
            first, last = max(record.start - begin, at * part), min(record.end - begin, (at + 1) * part)
            opened[at] += max(0.0, last - first) / part
    rates = tokens / part
    wide = (WIDTH - LEFT - RIGHT) / count
    most, most_open = float(rates.max()) or 1.0, float(opened.max()) or 1.0
    body = []
    for at, rate in enumerate(rates):
        tall = rate / most * (height - top)
        tip = f"<title>{at * part:.2f} s: {rate:.1f} tokens/s, {opened[at]:.1f} requests open</title>"
        body.append(_rect(LEFT + at * wide, height - tall, max(0.5, wide - 0.5), tall, BLUE, tip))
    line = " ".join(
        f"{LEFT + (at + 0.5) * wide:.1f},{height - number / most_open * (height - top):.1f}"
        for at, number in enumerate(opened)
    )
    body.append(f"<polyline points='{line}' fill='none' stroke='{ORANGE}' stroke-width='2' />")
    body.append(_text(LEFT - 6, top + 4, f"{most:,.0f}", "end") + _text(LEFT - 6, height, "0", "end"))
    body.append(_text(WIDTH - RIGHT + 6, top + 4, f"{most_open:.0f} open", "start"))
    body.append(_time_axis(span, top, height))
    return _svg(WIDTH, height + 22, body)


def _histogram(values: Sequence[float], what: str) -> str:
    """Counts over ms; the axis is logarithmic where the tail is long, so that body and tail can both be read."""
    width, height, left = 540, 190, 50
    if not values:
        return "<p>none</p>"
    data = np.asarray(values)
    median, p99 = np.percentile(data, [50, 99])
    lowest, highest = float(data.min()), float(data.max())
    is_log = median > 0 and highest / median > 20
    if is_log:
        positive = data[data > 0]
        lowest = float(positive.min())
        edges = np.geomspace(lowest, highest * 1.0001, 49)
        data = np.maximum(data, lowest)
    else:
        lowest, highest = 0.0, highest * 1.0001 or 1.0
        edges = np.linspace(lowest, highest, 49)

    def x(value: float) -> float:
        place = math.log(max(value, lowest) / lowest) / math.log(edges[-1] / lowest) if is_log else value / edges[-1]
        return left + place * (width - left - 20)

    counts, _ = np.histogram(data, edges)
    most = counts.max() or 1
    body = []
    for count, first, last in zip(counts, edges[:-1], edges[1:]):
        tall = count / most * (height - 34)
        tip = f"<title>{first:.4g} to {last:.4g} ms: {count:,} {what}</title>"
        body.append(_rect(x(first), height - tall, max(0.5, x(last) - x(first) - 0.5), tall, BLUE, tip))
    for row, (name, value) in enumerate((("P50", median), ("P99", p99))):
        place = x(float(value))
        anchor = "end" if place > width - 110 else "start"
        body.append(f"<line x1='{place:.1f}' x2='{place:.1f}' y1='{6 + 14 * row}' y2='{height}' stroke='{RED}' />")
        body.append(_text(place + (-4 if anchor == "end" else 4), 14 + 14 * row, f"{name} {value:,.4g} ms", anchor))
    ticks = decades(lowest, edges[-1]) if is_log else round_ticks(edges[-1])
    body += [_text(x(tick), height + 15, f"{tick:,g}", "middle") for tick in ticks]
    body.append(_text(left - 6, 40, f"{most:,}", "end") + _text(left - 6, height, "0", "end"))
    scale = "ms, logarithmic" if is_log else "ms"
    body.append(_text((left + width) / 2, height + 29, scale, "middle"))
    return _svg(width, height + 34, body)


def _bars(records: Sequence[RequestRecord], begin: float, end: float) -> str:
    ordered = sorted(records, key=lambda record: record.start)
    shown = ordered[:: -(-len(ordered) // MAX_BARS) or 1]
    span, top = max(1e-3, end - begin), 16
    tall = max(1.5, min(14.0, 560 / max(1, len(shown))))
    scale = (WIDTH - LEFT - RIGHT) / span

    def place(start: float, stop: float) -> tuple[float, float]:
        return LEFT + (start - begin) * scale, max(0.8, (stop - start) * scale)

    body = []
    for row, record in enumerate(shown):
        y = top + row * tall
        first = record.arrivals[0][0] if record.arrivals else record.end
        tip = _tip(ordered.index(record) if len(shown) == len(ordered) else row, record, begin)
        for colour, (x, width) in ((PALE, place(record.start, first)), (BLUE, place(first, record.end))):
            if record.arrivals or colour == PALE:
                body.append(_rect(x, y, width, max(1.0, tall - 0.7), RED if record.error else colour, tip))
    height = top + len(shown) * tall
    body.append(_time_axis(span, top - 4, height))
    note = "" if len(shown) == len(ordered) else f"<p>{len(shown)} of {len(ordered)} requests</p>"
    return note + _svg(WIDTH, height + 22, body)


def _tip(number: int, record: RequestRecord, begin: float) -> str:
    text = f"request {number}: sent at {record.start - begin:.3f} s, {record.prompt_tokens} tokens in"
    text += f", {record.output_tokens} out"
    if record.arrivals:
        text += f", first token after {1e3 * record.ttft:.0f} ms"
    if record.cached_tokens:
        text += f", {record.cached_tokens} cached"
    return f"<title>{text}{f', failed: {html.escape(record.error)}' if record.error else ''}</title>"


def _time_axis(span: float, top: float, bottom: float) -> str:
    parts = []
    for second in round_ticks(span, 10):
        x = LEFT + (WIDTH - LEFT - RIGHT) * second / span
        parts.append(
            f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{top}' y2='{bottom}' stroke='#000' stroke-opacity='0.08' />"
        )
        parts.append(_text(x, bottom + 15, f"{second:,g} s", "middle"))
    return "".join(parts)


def _rect(x: float, y: float, width: float, height: float, colour: str, tip: str) -> str:
    shape = f"x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}'"
    return f"<rect {shape} fill='{colour}'>{tip}</rect>"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{html.escape(text)}</text>"


def _svg(width: float, height: float, body: Sequence[str]) -> str:
    return f"<svg width='{width}' height='{height:.0f}'>{''.join(body)}</svg>"
