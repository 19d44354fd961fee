"""`jserve top`: a running server at a glance, in the terminal: what runs and waits, KV in use, rates, shares.

Rates and shares are over the time between two looks.  Asks GetLoads, which never waits behind generation.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from jserve.cli.client_flags import add_client_flags, client_access
from jserve.cli.command import Command
from jserve.cli.number_flags import number
from jserve.request import RequestError

HISTORY = 60
"""Looks whose tokens a second are drawn."""
BARS = " ▁▂▃▄▅▆▇█"
COUNTERS = (
    "generated_tokens", "prompt_tokens", "scheduled_tokens", "padded_tokens", "num_steps", "prefix_cache_hit_tokens",
    "prefix_cache_queried_tokens", "num_preemptions", "requests_stopped", "requests_length", "requests_aborted",
    "requests_refused", "requests_failed",
)


@dataclass(frozen=True)
class Look:
    """GetLoads at a moment of `time.perf_counter()`."""

    at: float
    loads: Mapping[str, float]


def figures(before: Look, now: Look) -> dict[str, float]:
    """What happened between two looks, and what is now."""
    seconds = max(1e-9, now.at - before.at)
    made = {name: now.loads[name] - before.loads[name] for name in COUNTERS}
    computed = made["scheduled_tokens"] + made["padded_tokens"]
    ended = made["requests_stopped"] + made["requests_length"]
    return {
        "running": now.loads["num_running"],
        "waiting": now.loads["num_waiting"],
        "open_streams": now.loads["num_open_streams"],
        "kv_usage": now.loads["kv_usage"],
        "cached_blocks_share": _share(now.loads["num_cached_blocks"], now.loads["num_total_blocks"]),
        "output_tokens_per_s": made["generated_tokens"] / seconds,
        "prompt_tokens_per_s": made["prompt_tokens"] / seconds,
        "steps_per_s": made["num_steps"] / seconds,
        "tokens_per_step": _share(made["scheduled_tokens"], made["num_steps"]),
        "requests_per_s": ended / seconds,
        "prefix_cache_hit_rate": _share(made["prefix_cache_hit_tokens"], made["prefix_cache_queried_tokens"]),
        "padded_share": _share(made["padded_tokens"], computed),
        "preemptions": made["num_preemptions"],
        "refused": made["requests_refused"],
        "failed": made["requests_failed"],
        "compiles_after_ready": now.loads["compiles_after_ready"],
    }


def render(one: Mapping[str, float], title: str, history: deque[float]):
    """A panel for rich."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for _ in range(4):
        table.add_column(justify="left", no_wrap=True)
    rows = (
        ("running", f"{one['running']:,.0f}", "output tokens/s", f"{one['output_tokens_per_s']:,.1f}"),
        ("waiting", f"{one['waiting']:,.0f}", "prompt tokens/s", f"{one['prompt_tokens_per_s']:,.1f}"),
        ("KV in use", _bar(one["kv_usage"]), "requests/s", f"{one['requests_per_s']:,.2f}"),
        ("KV cached", _bar(one["cached_blocks_share"]), "steps/s", f"{one['steps_per_s']:,.1f}"),
        ("prefix hits", _bar(one["prefix_cache_hit_rate"]), "tokens/step", f"{one['tokens_per_step']:,.1f}"),
        ("padded", _bar(one["padded_share"]), "preempted, refused, failed",
         f"{one['preemptions']:,.0f}, {one['refused']:,.0f}, {one['failed']:,.0f}"),
        ("tokens/s", _spark(history), "compiles after ready", f"{one['compiles_after_ready']:,.0f}"),
    )
    for left, value, right, other in rows:
        table.add_row(Text(left, style="dim"), value, Text(right, style="dim"), other)
    return Panel(table, title=title, title_align="left", expand=False)


def _bar(share: float, width: int = 20) -> str:
    filled = round(max(0.0, min(1.0, share)) * width)
    return "█" * filled + "░" * (width - filled) + f" {share:5.1%}"


def _spark(history: deque[float]) -> str:
    most = max(history, default=0.0) or 1.0
    return "".join(BARS[round(value / most * (len(BARS) - 1))] for value in list(history)[-27:])


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def run(arguments: argparse.Namespace) -> int:
    from jserve.server.client import Client

    with Client(arguments.address, **client_access(arguments)) as client:
        before = _look(client)
        name = client.model_info().name
        if arguments.once or not sys.stdout.isatty():
            time.sleep(arguments.interval)
            print(json.dumps({"model": name, **figures(before, _look(client))}))
            return 0
        return _watch(client, before, f"{name} on {arguments.address}, Ctrl-C ends", arguments.interval)


def _watch(client, before: Look, title: str, interval: float) -> int:
    from rich.live import Live

    history: deque[float] = deque(maxlen=HISTORY)
    with Live(render(figures(before, before), title, history), auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            try:
                now = _look(client)
            except RequestError as error:
                live.update(f"{title}: {error.code.value}: {error.message}", refresh=True)
                continue
            one = figures(before, now)
            history.append(one["output_tokens_per_s"])
            live.update(render(one, title, history), refresh=True)
            before = now


def _look(client) -> Look:
    loads = client.loads()
    return Look(time.perf_counter(), {field.name: getattr(loads, field.name) for field in loads.DESCRIPTOR.fields})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", default="127.0.0.1:50051", metavar="HOST:PORT", help="[%(default)s]")
    parser.add_argument(
        "--interval", type=number(above=True), default=1.0, metavar="S", help="seconds between looks [%(default)g]"
    )
    parser.add_argument("--once", action="store_true", help="one JSON object over an interval (as without a terminal)")
    add_client_flags(parser)


COMMAND = Command(
    usage="[--address HOST:PORT] [--interval S]",
    summary="What a running server does: requests, KV cache, tokens a second, cache hits, padding.",
    add_arguments=add_arguments,
    run=run,
)
