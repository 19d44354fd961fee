"""`jserve bench host`: what the host does for a step, and how that grows with running and waiting sequences."""

from __future__ import annotations

import argparse
import json
import sys

from jserve.bench import report
from jserve.cli.command import Command
from jserve.cli.number_flags import whole, whole_list
from jserve.scheduler import POLICIES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--running", type=whole_list, default=(64, 128, 256), metavar="LIST", help="[64,128,256]")
    parser.add_argument("--waiting", type=whole_list, default=(1_000, 100_000), metavar="LIST", help="[1000,100000]")
    parser.add_argument("--context", type=whole(), default=1000, metavar="N", help="tokens of a sequence [%(default)s]")
    parser.add_argument("--num-steps", type=whole(), default=200, metavar="N", help="steps a point [%(default)s]")
    parser.add_argument("--block-size", type=whole(), default=64, metavar="N", help="[%(default)s]")
    parser.add_argument("--policy", choices=POLICIES, default="fcfs", help="[%(default)s]")
    parser.add_argument("--profile", action="store_true", help="say where the time of each point goes")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.add_argument("--save-result", action="store_true", help="also write it as a file")
    parser.add_argument("--result-dir", default="results", metavar="FOLDER", help="[%(default)s]")


def run(arguments: argparse.Namespace) -> int:
    from jserve.bench import host

    loads = [
        host.HostLoad(
            running, waiting, arguments.context, churn, arguments.num_steps, arguments.block_size, arguments.policy
        )
        for churn in (False, True)
        for waiting in arguments.waiting
        for running in arguments.running
    ]
    measured = []
    for load in loads:
        measured.append(host.measure(load))
        if arguments.profile:
            print(host.measure(load, profile=True).profile, file=sys.stderr)
    answer = host.figures(measured)
    print(json.dumps(answer) if arguments.json else host.render(answer))
    if arguments.save_result:
        print(f"saved {report.save(answer, arguments.result_dir)}", file=sys.stderr)
    return 0


COMMAND = Command(
    usage="[--running LIST] [--waiting LIST] [flags]",
    summary="Host time of a step (schedule, build, apply) over a stand-in device, by running and waiting sequences.",
    add_arguments=add_arguments,
    run=run,
    epilog="""\
steady: the same sequences decode in every step; churn: about one ends and another enters in every step.
example:
  jserve bench host --running 256 --waiting 100000 --profile""",
)
