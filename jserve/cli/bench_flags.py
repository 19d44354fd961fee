"""Flags of the modes of `jserve bench`, named as those of `vllm bench`, and what their values may be."""

from __future__ import annotations

import argparse

from jserve.bench import report
from jserve.cli.flags import add_config_flags


def add_load_flags(
    parser: argparse.ArgumentParser, *, num_prompts: int, concurrency: bool, percentiles: tuple[float, ...]
) -> None:
    load = parser.add_argument_group("load")
    load.add_argument("--dataset-name", default="random", metavar="NAME", help="random ids [%(default)s]")
    load.add_argument("--num-prompts", type=_positive, default=num_prompts, metavar="N", help="requests [%(default)s]")
    load.add_argument(
        "--random-input-len",
        "--input-len",
        type=_positive,
        default=128,
        metavar="N",
        help="prompt tokens [%(default)s]",
    )
    load.add_argument(
        "--random-output-len",
        "--output-len",
        type=_positive,
        default=64,
        metavar="N",
        help="output tokens [%(default)s]",
    )
    load.add_argument(
        "--random-range-ratio",
        type=_ratio,
        default=0.0,
        metavar="R",
        help="lengths vary by this share, 0 to 1 [%(default)s]",
    )
    if concurrency:
        load.add_argument("--max-concurrency", type=_positive, metavar="N", help="requests open at once [max_num_seqs]")
    load.add_argument(
        "--num-warmups", type=_natural, default=1, metavar="N", help="requests before the figures begin [%(default)s]"
    )
    load.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="every output has its full length [on]",
    )
    load.add_argument("--temperature", type=float, default=0.0, metavar="T", help="[%(default)s]")
    load.add_argument(
        "--seed", type=int, metavar="N", help="same prompts again; unset: prompts no earlier run has sent"
    )
    _add_report_flags(parser)
    group = parser.add_argument_group("figures")
    group.add_argument(
        "--percentile-metrics",
        type=_metrics,
        default=tuple(report.METRICS),
        metavar="LIST",
        help="of ttft,tpot,itl,e2el [all]",
    )
    group.add_argument(
        "--metric-percentiles",
        type=_percentiles,
        default=percentiles,
        metavar="LIST",
        help=f"[{','.join(map(str, percentiles))}]",
    )
    group.add_argument("--save-detailed", action="store_true", help="keep each request's lengths and times in the JSON")
    add_config_flags(parser)


def add_startup_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--num-warm", type=_natural, default=3, metavar="N", help="warm starts; the median counts [%(default)s]"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    _add_report_flags(parser)
    add_config_flags(parser)


def _add_report_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print the report as one JSON object")
    group.add_argument("--save-result", action="store_true", help="also write it as a file")
    group.add_argument(
        "--result-dir", default="results", metavar="FOLDER", help="where --save-result writes [%(default)s]"
    )


def _positive(text: str) -> int:
    return _integer_from(1, text)


def _natural(text: str) -> int:
    return _integer_from(0, text)


def _integer_from(lowest: int, text: str) -> int:
    try:
        if int(text) >= lowest:
            return int(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r}: expected an integer of at least {lowest}")


def _ratio(text: str) -> float:
    try:
        if 0 <= float(text) <= 1:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r}: expected a number from 0 to 1")


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in report.METRICS:
            raise argparse.ArgumentTypeError(f"{name!r}: expected some of {','.join(report.METRICS)}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
        if all(0 <= value <= 100 for value in values):
            return values
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r}: expected numbers from 0 to 100, separated by commas")
