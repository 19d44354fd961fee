"""One picture of a run: which request held which row in which step, and how many tokens each step computed.

A page of HTML with inline SVG, nothing to install or fetch.  Several runs stand below each other on one time axis.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from jserve.bench.ticks import round_ticks
from jserve.simulator.clock import Run, Segment

WIDTH, LEFT, RIGHT = 1200, 110, 20
MAX_ROWS = 64
"""Rows that are drawn; a larger batch shows its first ones."""
STRIP_HEIGHT = 60

STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 24px; color: #222; max-width: 1240px; }
h1 { font-size: 20px; margin: 0 0 4px; } h2 { font-size: 16px; margin: 28px 0 2px; }
p { margin: 2px 0 8px; color: #555; }
svg { display: block; background: #fafafa; } text { font: 11px system-ui, sans-serif; fill: #444; }
.label { fill: #fff; font-weight: 600; pointer-events: none; }
.key { display: inline-block; width: 14px; height: 12px; margin: 0 4px 0 14px; vertical-align: -1px; }
"""


def write_timeline(path: str | Path, runs: Sequence[Run], title: str, *, in_steps: bool = False) -> None:
    """Writes the page.  `in_steps`: the axis counts steps; otherwise seconds."""
    Path(path).write_text(timeline_html(runs, title, in_steps=in_steps))


def timeline_html(runs: Sequence[Run], title: str, *, in_steps: bool = False) -> str:
    longest = max((_end(segment, in_steps) for run in runs for segment in run.segments), default=1.0)
    parts = [_panel(run, longest, in_steps) for run in runs]
    return (
        f"<!doctype html><meta charset='utf-8'><title>{html.escape(title)}</title><style>{STYLE}</style>"
        f"<h1>{html.escape(title)}</h1>"
        "<p>One line a row of the batch; a colour is a request."
        " <span class='key' style='background:#4477aa'></span>decode"
        "<span class='key' style='background:#4477aa;opacity:.45;border-bottom:3px solid #222'></span>prefill"
        "<span class='key' style='background:#ddd'></span>held by a request that is done. Below: tokens of each step"
        " (grey: padding). Hover for numbers.</p>" + "".join(parts)
    )


def _panel(run: Run, longest: float, in_steps: bool) -> str:
    rows = sorted({segment.row for segment in run.segments})[:MAX_ROWS]
    place = {row: at for at, row in enumerate(rows)}
    height = 20 if len(rows) <= 16 else 12 if len(rows) <= 32 else 7
    scale = (WIDTH - LEFT - RIGHT) / longest
    top = 18
    body = [
        _bar(segment, LEFT, top + place[segment.row] * height, height, scale, in_steps)
        for segment in run.segments
        if segment.row in place
    ]
    bottom = top + len(rows) * height
    for at, row in enumerate(rows):
        if height >= 12 or at % 8 == 0:
            y = top + at * height + height / 2 + 4
            body.append(f"<text x='{LEFT - 8}' y='{y}' text-anchor='end'>row {row}</text>")
    body.append(_axis(longest, scale, top, bottom, in_steps))
    body.append(_strip(run, bottom + 14, scale, longest, in_steps))
    total = bottom + 14 + STRIP_HEIGHT + 16
    head = f"<h2>{html.escape(run.system)}</h2><p>{_caption(run)}</p>"
    return f"{head}<svg width='{WIDTH}' height='{total}'>{''.join(body)}</svg>"


def _caption(run: Run) -> str:
    places = run.num_steps * run.num_rows
    held = sum(run.step_useful) / places if all(r.prompt == 1 for r in run.requests.values()) else None
    text = f"{run.num_steps:,} steps, {run.useful_share:.1%} of the computed tokens useful"
    if held is not None:
        text += f"; {sum(run.step_useful)} of {places} places held by a request that gets a token ({held:.1%})"
    gaps = run.gaps()
    if len(gaps):
        longest = gaps.max()
        text += f"; longest gap between two tokens {longest:.3g} s"
    return text


def _bar(segment: Segment, left: float, y: float, height: float, scale: float, in_steps: bool) -> str:
    start = segment.first_step - 1 if in_steps else segment.start
    x, width = left + start * scale, max(0.4, (_end(segment, in_steps) - start) * scale)
    colour = "#ddd" if segment.kind == "idle" else _colour(segment.number)
    fade = " fill-opacity='.45'" if segment.kind == "prefill" else ""
    steps = f"steps {segment.first_step} to {segment.last_step}"
    seconds = f"{segment.start:.4g} to {segment.end:.4g} s"
    tip = f"<title>request {segment.number}: {segment.kind}, {steps}, {seconds}</title>"
    shape = f"x='{x:.1f}' y='{y + 1:.1f}' width='{width:.1f}' height='{height - 2}'"
    parts = [f"<rect {shape} fill='{colour}'{fade}>{tip}</rect>"]
    if segment.kind == "prefill":
        parts.append(f"<rect x='{x:.1f}' y='{y + height - 4:.1f}' width='{width:.1f}' height='3' fill='#222' />")
    if width > 22 and height >= 12 and segment.kind != "idle":
        place = f"x='{x + 4:.1f}' y='{y + height / 2 + 4:.1f}'"
        parts.append(f"<text class='label' {place}>{_name(segment.number)}</text>")
    return "".join(parts)


def _axis(longest: float, scale: float, top: float, bottom: float, in_steps: bool) -> str:
    parts = []
    for value in round_ticks(longest, min(10, longest) if in_steps else 10):
        x = LEFT + value * scale
        label = f"{value:,g}" if in_steps else f"{value:,g} s"
        parts.append(f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{top - 3}' y2='{bottom}' stroke='#0002' />")
        parts.append(f"<text x='{x:.1f}' y='{top - 6}' text-anchor='middle'>{label}</text>")
    return "".join(parts)


def _strip(run: Run, y: float, scale: float, longest: float, in_steps: bool) -> str:
    """Tokens a step, as bars as wide as the step."""
    most = max(run.step_computed, default=1)
    parts = [
        f"<text x='{LEFT - 8}' y='{y + 10}' text-anchor='end'>{most:,} tokens</text>",
        f"<text x='{LEFT - 8}' y='{y + STRIP_HEIGHT}' text-anchor='end'>0</text>",
    ]
    for at, (end, seconds) in enumerate(zip(run.step_ends, run.step_seconds)):
        first, last = (at, at + 1) if in_steps else (end - seconds, end)
        if last > longest * 1.0001:
            break
        x, width = LEFT + first * scale, max(0.4, (last - first) * scale)
        for count, colour in ((run.step_computed[at], "#ccc"), (run.step_useful[at], "#668866")):
            tall = STRIP_HEIGHT * count / most
            shape = f"x='{x:.1f}' y='{y + STRIP_HEIGHT - tall:.1f}' width='{width:.1f}' height='{tall:.1f}'"
            parts.append(f"<rect {shape} fill='{colour}' />")
    return "".join(parts)


def _end(segment: Segment, in_steps: bool) -> float:
    return segment.last_step if in_steps else segment.end


def _colour(number: int) -> str:
    """Neighbours differ: the hue turns by the golden angle."""
    return f"hsl({number * 137.508 % 360:.0f} 55% 45%)"


def _name(number: int) -> str:
    """A, B, ... Z, then numbers."""
    return chr(ord("A") + number) if number < 26 else str(number)
