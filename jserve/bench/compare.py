"""`bench compare A.json B.json`: two reports side by side, B over A, and which way is better."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from jserve.bench import report
from jserve.config import ConfigError

HIGHER_IS_BETTER = {
    "Request throughput (req/s)": "request_throughput",
    "Request goodput (req/s)": "request_goodput",
    "Output token throughput (tok/s)": "output_throughput",
    "Peak output throughput (tok/s)": "max_output_tokens_per_s",
    "Total token throughput (tok/s)": "total_token_throughput",
    "Cached share of input tokens": "cached_token_share",
}
LOWER_IS_BETTER = {
    "Failed requests": "failed",
    "Benchmark duration (s)": "duration",
    "Padded share of computed tokens": "padded_token_share",
    "Cold start to ready (s)": "cold_ready_s",
    "Warm start to ready (s)": "warm_ready_s",
}
SETTINGS = (
    "mode", "backend", "model_id", "dtype", "kv_dtype", "device", "dataset_name", "num_prompts", "random_input_len",
    "random_output_len", "random_range_ratio", "request_rate", "max_concurrency", "ignore_eos", "seed",
)
"""Where these differ, the figures may not be comparable."""


def read(path: str | Path) -> dict[str, object]:
    """A saved report.  ConfigError where the file is none."""
    try:
        found = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict) or found.get("schema") != report.SCHEMA:
        raise ConfigError(f"{path}: not a report of jserve bench (schema {report.SCHEMA})")
    return found


def compare(a: Mapping[str, object], b: Mapping[str, object]) -> dict[str, object]:
    """`ratios` are B over A; `differing` names the settings that are not the same."""
    rows = []
    for label, key in {**HIGHER_IS_BETTER, **LOWER_IS_BETTER, **_latencies(a, b)}.items():
        first, second = a.get(key), b.get(key)
        if not _is_number(first) or not _is_number(second):
            continue
        ratio = second / first if first else None
        better = None if first == second else (second > first) == (key in HIGHER_IS_BETTER.values())
        rows.append({"label": label, "key": key, "a": first, "b": second, "ratio": ratio, "b_is_better": better})
    differing = {name: (a.get(name), b.get(name)) for name in SETTINGS if a.get(name) != b.get(name)}
    return {"ratios": rows, "differing": differing}


def render(answer: Mapping[str, object], names: Sequence[str] = ("A", "B")) -> str:
    lines = [f"{'':<36}{names[0]:>14}{names[1]:>14}{'ratio':>9}"]
    for row in answer["ratios"]:
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}x"
        mark = {True: "better", False: "worse", None: ""}[row["b_is_better"]]
        lines.append(f"{row['label']:<36}{_shown(row['a']):>14}{_shown(row['b']):>14}{ratio:>9}  {mark}".rstrip())
    for name, (first, second) in answer["differing"].items():
        lines.append(f"not the same: {name}: {first} | {second}")
    return "\n".join(lines)


def _latencies(a: Mapping[str, object], b: Mapping[str, object]) -> dict[str, str]:
    found = {}
    for metric, (short, _) in report.METRICS.items():
        for key in a:
            if key.endswith(f"_{metric}_ms") and not key.startswith("std_") and key in b:
                found[f"{key.removesuffix(f'_{metric}_ms').capitalize()} {short} (ms)"] = key
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}" if abs(value) < 10 else f"{value:,.1f}"
