"""`bench startup`: seconds from launching the process to a ready engine and to its first token, cold and warm.

Each start is a process of its own.  Cold: an empty compile cache; warm: the one that the cold start filled.  The model
is on disk before.  The child prints one JSON line, which is all the parent reads of it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

from jserve.bench import report

READY, FIRST_TOKEN = "ready_s", "first_token_s"


class StartFailed(RuntimeError):
    """A child did not come up; the message is its last line."""


def run(flags: Sequence[str], model_path: str, num_warm: int, line: Callable[[str], None]) -> dict[str, object]:
    """One cold start, `num_warm` warm ones.  `flags` are the config flags that every child gets."""
    with tempfile.TemporaryDirectory(prefix="jserve-startup-") as cache:
        own = ["--model.path", model_path, "--compile.cache_dir", cache]
        line("cold start (empty compile cache) ...")
        cold = _start([*flags, *own])
        line(f"  ready after {cold[READY]:.2f} s")
        warm = []
        for number in range(num_warm):
            line(f"warm start {number + 1} of {num_warm} ...")
            warm.append(_start([*flags, *own]))
            line(f"  ready after {warm[-1][READY]:.2f} s")
    figures = report.header("startup", model_id=cold["model_id"], **cold["about"])
    figures["num_warm"] = num_warm
    figures["compiles_after_ready"] = max(start["compiles_after_ready"] for start in [cold, *warm])
    for name in (READY, FIRST_TOKEN):
        figures[f"cold_{name}"] = cold[name]
        figures[f"warm_{name}"] = statistics.median(start[name] for start in warm) if warm else None
    figures["cold_phases_s"] = cold["phases_s"]
    figures["warm_phases_s"] = warm[-1]["phases_s"] if warm else {}
    return figures


def render(figures: dict[str, object]) -> str:
    """A table of both starts, by phase."""
    lines = [f"{' Start-up Benchmark Result ':=^50}", f"{'seconds':<26}{'cold':>12}{'warm':>12}"]
    cold, warm = figures["cold_phases_s"], figures["warm_phases_s"]
    for phase in {**cold, **warm}:
        lines.append(f"{'  ' + phase:<26}{_shown(cold.get(phase)):>12}{_shown(warm.get(phase)):>12}")
    for label, name in (("ready", READY), ("first token", FIRST_TOKEN)):
        lines.append(f"{label:<26}{_shown(figures[f'cold_{name}']):>12}{_shown(figures[f'warm_{name}']):>12}")
    return "\n".join([*lines, "=" * 50])


def _shown(seconds: object) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"


def _start(flags: Sequence[str]) -> dict[str, object]:
    """One child: its own timestamps, moved to the moment before it was launched."""
    launched = time.monotonic()
    command = [sys.executable, "-m", "jserve.cli.main", "bench", "startup", "--child", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        if "Traceback" in done.stderr:
            sys.stderr.write(done.stderr)
        lines = [text for text in done.stderr.splitlines() if text.strip()]
        last = lines[-1].removeprefix("jserve bench startup: ") if lines else f"status {done.returncode}"
        raise StartFailed(f"the engine did not start: {last}")
    child = json.loads(done.stdout.splitlines()[-1])
    ready = child["ready_at"] - launched
    phases = {"python": child["began_at"] - launched, **child["phases_s"]}
    phases["everything else"] = ready - sum(phases.values())
    return {**child, READY: ready, FIRST_TOKEN: child["first_token_at"] - launched, "phases_s": phases}
