"""`jserve bench compare A.json B.json`: two saved reports, B over A."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from jserve.bench import compare
from jserve.cli.command import Command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A.json", help="the report that is 1")
    parser.add_argument("b", metavar="B.json", help="the report that is measured against it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    answer = compare.compare(compare.read(arguments.a), compare.read(arguments.b))
    if arguments.json:
        print(json.dumps(answer))
        return 0
    names = [Path(path).stem[-13:] for path in (arguments.a, arguments.b)]
    print(compare.render(answer, names if names[0] != names[1] else ("A", "B")))
    return 0


COMMAND = Command(
    usage="A.json B.json [--json]",
    summary="Ratios of two saved reports (--save-result), and where their settings differ.",
    add_arguments=add_arguments,
    run=run,
)
