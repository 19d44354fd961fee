"""The load that a latency target allows: the highest request rate at which P99 of the time between tokens keeps it
and requests do not queue up, as Sarathi-Serve measures capacity."""

from __future__ import annotations

import functools
import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jserve.bench.ticks import round_ticks
from jserve.simulator.clock import Run, simulate
from jserve.simulator.steps import StepSeconds, System
from jserve.simulator.workload import Lengths, arrival_times

CHECK_EVERY = 256
"""Steps between two looks at whether a probe has failed already."""
MAX_MEDIAN_QUEUE_S = 2.0
"""Of the later half of the requests.  Beyond it the system is overloaded, however short its gaps are."""


@dataclass(frozen=True)
class Probe:
    """One simulated rate."""

    rate: float
    p99_tbt_s: float
    median_queue_s: float

    def keeps(self, target_s: float) -> bool:
        return self.p99_tbt_s <= target_s and self.median_queue_s <= MAX_MEDIAN_QUEUE_S


@dataclass(frozen=True)
class Capacity:
    system: str
    target_s: float
    rate: float
    """Requests a second; 0: the target is missed at any load."""
    probes: list[Probe]


def find_capacity(
    name: str,
    make: Callable[[], System],
    lengths: Lengths,
    step_seconds: StepSeconds,
    target_s: float,
    *,
    seed: int = 0,
    num_halvings: int = 4,
    first: float = 8.0,
    lowest: float = 0.25,
) -> Capacity:
    """Doubles the rate until the target is missed (or halves it until it is kept), then halves the interval.

    Args:
      lowest: a target that is missed at this rate is missed at any.
    """
    probes: dict[float, Probe] = {}

    def keeps(rate: float) -> bool:
        probes[rate] = _probe(make(), lengths, step_seconds, rate, target_s, seed)
        return probes[rate].keeps(target_s)

    below, above = first, first
    if keeps(first):
        while keeps(above := 2 * below):
            below = above
    else:
        while not keeps(below := above / 2):
            above = below
            if below <= lowest:
                return Capacity(name, target_s, 0.0, [probes[rate] for rate in sorted(probes)])
    for _ in range(num_halvings):
        middle = (below + above) / 2
        below, above = (middle, above) if keeps(middle) else (below, middle)
    return Capacity(name, target_s, below, [probes[rate] for rate in sorted(probes)])


def _probe(
    system: System, lengths: Lengths, step_seconds: StepSeconds, rate: float, target_s: float, seed: int
) -> Probe:
    """One rate; cut short, with the figures so far, once the target is sure to be missed."""
    arrivals = arrival_times(len(lengths.prompts), rate, 1.0, seed)
    most_late = 0.01 * float((lengths.outputs - 1).sum())

    def is_missed(run: Run) -> bool:
        if run.num_steps % CHECK_EVERY:
            return False
        num_late = int((run.gaps() > target_s).sum())
        return num_late > most_late

    run = simulate(system, lengths.requests(arrivals), step_seconds, stop=is_missed)
    gaps = run.gaps()
    later_half = range(len(lengths.prompts) // 2, len(lengths.prompts))  # by then a backlog has built up, if it will
    waits = [run.starts[n] - run.requests[n].arrival for n in later_half if n in run.starts]
    if run.refused or not waits:
        return Probe(rate, math.inf, math.inf)
    return Probe(rate, float(np.percentile(gaps, 99)) if len(gaps) else 0.0, float(np.median(waits)))


def table(capacities: Sequence[Capacity]) -> str:
    """Requests a second by system and target, and ours over each of the others."""
    names = list(dict.fromkeys(one.system for one in capacities))
    targets = sorted({one.target_s for one in capacities})
    rate = {(one.system, one.target_s): one.rate for one in capacities}
    lines = ["P99 time between tokens (ms):".ljust(32) + "".join(f"{1e3 * target:>12g}" for target in targets)]
    for name in names:
        lines.append(f"{name + ' (req/s)':<32}" + "".join(f"{rate[name, target]:>12.2f}" for target in targets))
    for name in names[1:]:
        ratios = [
            f"{rate[names[0], target] / rate[name, target]:.1f}x" if rate[name, target] else "-" for target in targets
        ]
        lines.append(f"{f'{names[0]} over {name}':<32}" + "".join(f"{ratio:>12}" for ratio in ratios))
    return "\n".join(lines)


def plot_svg(capacities: Sequence[Capacity]) -> str:
    """Capacity by target, one line a system, as a picture by itself."""
    width, height, left, bottom = 760, 380, 70, 330
    names = list(dict.fromkeys(one.system for one in capacities))
    targets = sorted({one.target_s for one in capacities})
    most = max((one.rate for one in capacities), default=1.0) or 1.0
    colours = ("#117733", "#cc6677", "#4477aa", "#aa8800", "#882255")

    def x(target: float) -> float:
        at = targets.index(target)
        return left + 40 + at * (width - left - 180) / max(1, len(targets) - 1)

    def y(rate: float) -> float:
        return bottom - rate / most * (bottom - 40)

    parts = [f"<line x1='{left}' x2='{width - 120}' y1='{bottom}' y2='{bottom}' stroke='#444' />"]
    for rate in round_ticks(most):
        parts.append(f"<text x='{left - 8}' y='{y(rate) + 4:.0f}' text-anchor='end'>{rate:g}</text>")
        place = f"x1='{left}' x2='{width - 120}' y1='{y(rate):.0f}' y2='{y(rate):.0f}'"
        parts.append(f"<line {place} stroke='#000' stroke-opacity='0.08' />")
    for target in targets:
        parts.append(f"<text x='{x(target):.0f}' y='{bottom + 18}' text-anchor='middle'>{1e3 * target:g} ms</text>")
    ends = {one.system: y(one.rate) for one in capacities if one.target_s == targets[-1]}
    labels = _apart(ends)
    for name, colour in zip(names, colours):
        points = [(x(one.target_s), y(one.rate)) for one in capacities if one.system == name]
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        parts.append(f"<polyline points='{line}' fill='none' stroke='{colour}' stroke-width='2.5' />")
        parts += [f"<circle cx='{px:.1f}' cy='{py:.1f}' r='4' fill='{colour}' />" for px, py in points]
        place = f"x='{points[-1][0] + 10:.0f}' y='{labels[name] + 4:.0f}'"
        parts.append(f"<text {place} fill='{colour}'>{html.escape(name)}</text>")
    parts.append(f"<text x='{left}' y='22'>requests a second that keep the target (up: better)</text>")
    middle = (left + width - 120) / 2
    parts.append(f"<text x='{middle:.0f}' y='{bottom + 40}' text-anchor='middle'>target for P99 TBT</text>")
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' font-family='sans-serif'"
        f" font-size='12'>{''.join(parts)}</svg>"
    )


def _apart(heights: Mapping[str, float], least: float = 14.0) -> dict[str, float]:
    """The same heights, moved up where two names would cover each other."""
    placed: dict[str, float] = {}
    below = math.inf
    for name in sorted(heights, key=heights.get, reverse=True):
        below = placed[name] = min(heights[name], below - least)
    return placed


def plot_html(capacities: Sequence[Capacity], title: str) -> str:
    """The picture and the table as a page."""
    return (
        f"<!doctype html><meta charset='utf-8'><title>{html.escape(title)}</title>"
        "<style>body{font:14px system-ui,sans-serif;margin:24px}</style>"
        f"<h1 style='font-size:20px'>{html.escape(title)}</h1>{plot_svg(capacities)}"
        f"<pre>{html.escape(table(capacities))}</pre>"
    )


def compare(
    makers: Mapping[str, Callable[[], System]],
    at_target: Mapping[str, Callable[[float], System]],
    lengths: Lengths,
    step_seconds: StepSeconds,
    targets_s: Sequence[float],
    on_done: Callable[[Capacity], None] = lambda capacity: None,
    **search,
) -> list[Capacity]:
    """Every system at every target, tightest first.  Those in `at_target` are made anew for each target, as they adapt
    to it; what such a system reaches under a tighter target counts for a looser one too, which it then keeps as well."""
    found = []
    for name in makers:
        rate = search.pop("first", 8.0)
        best = 0.0
        for target in sorted(targets_s):
            make = functools.partial(at_target[name], target) if name in at_target else makers[name]
            one = find_capacity(name, make, lengths, step_seconds, target, first=rate, **search)
            rate = one.rate or rate  # the next target's is not far
            if name in at_target:
                best = max(best, one.rate)
                one = replace(one, rate=best)
            found.append(one)
            on_done(one)
    return found
