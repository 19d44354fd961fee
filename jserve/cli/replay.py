"""`jserve replay`: makes the decisions of a step log again, without a model, and shows the first that differs."""

from __future__ import annotations

import argparse
import dataclasses
import json

from jserve.cli.command import Command
from jserve.engine.replay import describe, replay


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", metavar="LOG", help="what `jserve serve --step-log LOG` wrote")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    answer = replay(arguments.log)
    difference = answer.difference
    if arguments.json:
        print(json.dumps(dataclasses.asdict(answer) | {"same": difference is None}))
    else:
        print(
            f"{answer.num_steps:,} steps of {answer.num_requests:,} sequences, {answer.num_tokens:,} tokens,"
            f" {answer.num_preemptions:,} preemptions: " + ("the same decisions" if difference is None else "then")
        )
        if difference is not None:
            print(describe(difference))
    return 0 if difference is None else 1


COMMAND = Command(
    usage="LOG [--json]",
    summary="Runs the scheduler on a step log and compares every decision.  Exit code 1: one differs, or the log is bad.",
    add_arguments=add_arguments,
    run=run,
    epilog="example:\n  jserve serve --step-log steps.log        and later\n  jserve replay steps.log",
)
