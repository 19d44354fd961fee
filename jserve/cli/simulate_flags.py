"""Flags of `jserve bench simulate`, named as those of `vllm bench serve` where both have them."""

from __future__ import annotations

import argparse
import math

from jserve.cli.bench_flags import MergeTargets, target
from jserve.cli.number_flags import number, number_list, percentages, whole, whole_list
from jserve.planner.devices import DEVICES
from jserve.planner.roofline import BYTES_OF, KV_BYTES_OF
from jserve.planner.shapes import BUILT_IN
from jserve.scheduler import POLICIES
from jserve.simulator.systems import SYSTEMS
from jserve.simulator.workload import StallLoad

DATASETS = ("random", "lognormal", "trace", "stalls")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_machine(parser.add_argument_group("machine"))
    _add_settings(parser.add_argument_group("settings"))
    _add_load(parser.add_argument_group("load"))
    _add_stalls(parser.add_argument_group("--dataset-name stalls"))
    _add_output(parser.add_argument_group("output"))


def _add_machine(group) -> None:
    group.add_argument("-m", "--model", metavar="MODEL", help=f"config.json, or {', '.join(BUILT_IN)}")
    group.add_argument(
        "-d", "--device", default="h100-80gb", metavar="DEVICE",
        help=f"unit, {', '.join(DEVICES)} [%(default)s]",
    )
    group.add_argument("--tensor-parallel-size", "--tp", type=whole(), metavar="N", help="devices that share the model")
    group.add_argument("--dtype", choices=BYTES_OF, help="weights [bfloat16; cpu: float32]")
    group.add_argument("--kv-dtype", choices=KV_BYTES_OF, help="KV cache [dtype]")
    group.add_argument(
        "--memory-fraction", type=number(0, 1, above=True), default=0.9, metavar="F",
        help="[%(default)s]",
    )
    group.add_argument(
        "--reserve-gb", type=number(), default=2.0, metavar="GB",
        help="activations and the rest [%(default)g]",
    )
    group.add_argument(
        "--compute-efficiency", type=number(0, 1, above=True), default=1.0, metavar="F",
        help="share of the matrix rate [%(default)g]",
    )
    group.add_argument(
        "--bandwidth-efficiency", type=number(0, 1, above=True), default=1.0, metavar="F",
        help="share of the bandwidth [%(default)g]",
    )
    group.add_argument("--step-table", metavar="FILE", help="measured step times instead of the roofline, JSON")


def _add_settings(group) -> None:
    group.add_argument("--system", default="all", metavar="LIST", help=f"of {','.join(SYSTEMS)} [%(default)s]")
    group.add_argument("--context", type=whole(), metavar="N", help="longest sequence [8192, or what the load has]")
    group.add_argument("--block-size", type=whole(), default=16, metavar="N", help="[%(default)s]")
    group.add_argument("--max-num-batched-tokens", type=whole(), default=2048, metavar="N", help="[%(default)s]")
    group.add_argument("--max-num-seqs", type=whole(), default=256, metavar="N", help="[%(default)s]")
    group.add_argument("--rows", type=whole(), metavar="N", help="rows of every system, instead of what memory holds")
    group.add_argument("--policy", choices=POLICIES, default="fcfs", help="of jserve [%(default)s]")
    group.add_argument("--target-tbt-ms", type=number(above=True), metavar="MS", help="gap that jserve's steps keep")
    group.add_argument("--token-buckets", type=whole_list, metavar="LIST", help="[powers of two]")
    group.add_argument("--prefix-cache", action=argparse.BooleanOptionalAction, default=True, help="[on]")
    group.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=True, help="plan a step ahead [on]")


def _add_load(group) -> None:
    group.add_argument("--dataset-name", choices=DATASETS, default="random", help="[%(default)s]")
    group.add_argument(
        "--dataset-path", metavar="FILE",
        help="trace: JSON lines of prompt_tokens, output_tokens, arrival",
    )
    group.add_argument(
        "--outputs", type=whole_list, metavar="LIST",
        help="requests of these outputs and one prompt token, all at once",
    )
    group.add_argument("--repeat", type=whole(), default=1, metavar="N", help="--outputs so many times [%(default)s]")
    group.add_argument("--num-prompts", type=whole(), default=1000, metavar="N", help="[%(default)s]")
    group.add_argument(
        "--request-rate", type=number(above=True), default=math.inf, metavar="R",
        help="requests a second [all at once]",
    )
    group.add_argument(
        "--burstiness", type=number(above=True), default=1.0, metavar="B",
        help="1: Poisson; less: burstier [%(default)g]",
    )
    group.add_argument("--max-concurrency", type=whole(), metavar="N", help="a closed loop of so many clients")
    group.add_argument("--random-input-len", type=whole(), default=1024, metavar="N", help="[%(default)s]")
    group.add_argument("--random-output-len", type=whole(), default=128, metavar="N", help="[%(default)s]")
    group.add_argument("--random-range-ratio", type=number(0, 1), default=0.0, metavar="R", help="[%(default)g]")
    group.add_argument("--seed", type=whole(0), default=0, metavar="N", help="[%(default)s]")


def _add_stalls(group) -> None:
    load = StallLoad()
    group.add_argument(
        "--streams", type=whole(), default=load.streams, metavar="N",
        help="sequences that decode at all times [%(default)s]",
    )
    group.add_argument(
        "--stream-context", type=whole(), default=load.context, metavar="N",
        help="tokens they begin with [%(default)s]",
    )
    group.add_argument(
        "--stream-output", type=whole(), default=50_000, metavar="N",
        help="tokens they could produce [%(default)s]",
    )
    group.add_argument("--long-prompt", type=whole(), default=load.long_prompt, metavar="N", help="[%(default)s]")
    group.add_argument(
        "--long-every", type=number(above=True), default=load.every_s, metavar="S",
        help="seconds between long prompts [%(default)g]",
    )
    group.add_argument("--num-long", type=whole(), default=load.num_long, metavar="N", help="[%(default)s]")


def _add_output(group) -> None:
    group.add_argument(
        "--capacity", type=number_list, metavar="LIST",
        help="requests a second at these targets for P99 TBT, in ms",
    )
    group.add_argument(
        "--goodput", type=target, nargs="+", action=MergeTargets, metavar="NAME:MS", help="ttft:200 tpot:50"
    )
    group.add_argument("--metric-percentiles", type=percentages, default=(99.0,), metavar="LIST", help="[99]")
    group.add_argument(
        "--plot", metavar="FILE",
        help="HTML: which request held which row in which step (or the capacities)",
    )
    group.add_argument(
        "--picture-steps", type=whole(), default=400, metavar="N",
        help="steps in the picture [%(default)s]",
    )
    group.add_argument("--json", action="store_true", help="print the report as one JSON object")
    group.add_argument("--save-result", action="store_true", help="also write it as a file")
    group.add_argument("--result-dir", default="results", metavar="FOLDER", help="[%(default)s]")
