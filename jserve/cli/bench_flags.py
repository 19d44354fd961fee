"""Flags of the modes of `jserve bench`, named as those of `vllm bench`, and what their values may be."""

from __future__ import annotations

import argparse

from jserve.bench import report
from jserve.cli.flags import add_config_flags
from jserve.cli.number_flags import number, percentages, whole

DATASETS = ("random", "shared-prefix", "trace", "jsonl")


def add_load_flags(
    parser: argparse.ArgumentParser, *, num_prompts: int, concurrency: bool, percentiles: tuple[float, ...]
) -> None:
    """Flags of the modes that run an engine in this process."""
    load = add_dataset_flags(parser, num_prompts)
    if concurrency:
        load.add_argument("--max-concurrency", type=whole(), metavar="N", help="requests open at once [max_num_seqs]")
    add_figure_flags(parser, percentiles)
    add_config_flags(parser)


def add_dataset_flags(parser: argparse.ArgumentParser, num_prompts: int):
    """What is asked; returns the group, for flags that say when."""
    load = parser.add_argument_group("load")
    load.add_argument(
        "--dataset-name", choices=DATASETS, default="random",
        help="random ids; shared-prefix: groups of prompts that begin alike; trace: recorded lengths and times; jsonl:"
        " requests of a file [%(default)s]",
    )
    load.add_argument("--dataset-path", metavar="FILE", help="of trace (JSON lines, CSV) and jsonl")
    load.add_argument(
        "--num-prompts", type=whole(), metavar="N", help=f"requests [{num_prompts}; trace and jsonl: all]"
    )
    load.set_defaults(default_num_prompts=num_prompts)
    load.add_argument(
        "--random-input-len", "--input-len", type=whole(), default=128, metavar="N", help="prompt tokens [%(default)s]"
    )
    load.add_argument(
        "--random-output-len", "--output-len", type=whole(), default=64, metavar="N", help="output tokens [%(default)s]"
    )
    load.add_argument(
        "--random-range-ratio", type=number(0, 1), default=0.0, metavar="R",
        help="lengths vary by this share, 0 to 1 [%(default)s]",
    )
    load.add_argument(
        "--shared-prefix-len", type=whole(), default=384, metavar="N",
        help="shared tokens, before --random-input-len own ones a turn [%(default)s]",
    )
    load.add_argument("--shared-prefix-groups", type=whole(), default=4, metavar="N", help="[%(default)s]")
    load.add_argument(
        "--shared-prefix-turns", type=whole(), default=1, metavar="N",
        help="requests a user makes, each with all before it [%(default)s]",
    )
    load.add_argument(
        "--num-warmups", type=whole(0), default=1, metavar="N", help="requests before the figures begin [%(default)s]"
    )
    load.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True,
        help="every output has its full length [on]",
    )
    load.add_argument("--temperature", type=float, default=0.0, metavar="T", help="[%(default)s]")
    load.add_argument(
        "--seed", type=int, metavar="N", help="same prompts again; unset: prompts no earlier run has sent"
    )
    return load


def add_figure_flags(parser: argparse.ArgumentParser, percentiles: tuple[float, ...]):
    _add_report_flags(parser)
    group = parser.add_argument_group("figures")
    group.add_argument(
        "--percentile-metrics", type=_metrics, default=tuple(report.METRICS), metavar="LIST",
        help="of ttft,tpot,itl,e2el [all]",
    )
    group.add_argument(
        "--metric-percentiles", type=percentages, default=percentiles, metavar="LIST",
        help=f"[{','.join(map(str, percentiles))}]",
    )
    group.add_argument(
        "--goodput", type=target, nargs="+", action=MergeTargets, metavar="NAME:MS",
        help="count the requests that keep these limits, such as ttft:200 tpot:50",
    )
    group.add_argument("--save-detailed", action="store_true", help="keep each request's lengths and times in the JSON")
    group.add_argument(
        "--plot", metavar="FILE",
        help="HTML: tokens/s over time, TTFT and ITL, requests as bars; of a sweep the curves, as HTML or .svg",
    )
    group.add_argument(
        "--allowed-failures", type=whole(0), default=0, metavar="N",
        help="failed requests above which the exit code is 1 [%(default)s]",
    )
    return group


def add_startup_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--num-warm", type=whole(0), default=3, metavar="N", help="warm starts; the median counts [%(default)s]"
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
    group.add_argument(
        "--result-filename", metavar="NAME", help="of that file, which is replaced [of mode, model and date, a new one]"
    )
    group.add_argument("--label", metavar="TEXT", help="kept in the report")
    group.add_argument(
        "--metadata", type=_key_value, nargs="+", metavar="KEY=VALUE", default=(),
        help="kept in the report, such as version=0.3 machine=v5e",
    )


class MergeTargets(argparse.Action):
    """`ttft:200 tpot:50` as one mapping."""

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, {name: ms for one in values for name, ms in one.items()})


def target(text: str) -> dict[str, float]:
    """`ttft:200`: a metric and its limit in ms."""
    name, _, value = text.partition(":")
    if name not in report.METRICS:
        raise argparse.ArgumentTypeError(f"{name!r}: expected some of {','.join(report.METRICS)}, such as ttft:200")
    return {name: number(above=True)(value)}


def _key_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: expected KEY=VALUE")
    return key, value


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in report.METRICS:
            raise argparse.ArgumentTypeError(f"{name!r}: expected some of {','.join(report.METRICS)}")
    return names
