"""`jserve doctor`: what is right and what is not around jserve, and what to do about it."""

from __future__ import annotations

import argparse
import dataclasses
import json

from jserve.cli.command import Command
from jserve.cli.flags import add_config_flags, config_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_config_flags(parser, server=True)


def run(arguments: argparse.Namespace) -> int:
    config = config_from(arguments)
    from jserve.doctor import FAIL, WARN, run_checks

    findings = []
    for finding in run_checks(config):
        findings.append(finding)
        if not arguments.json:
            print(f"{finding.status:<5} {finding.check:<9} {finding.text}", flush=True)
            if finding.next_step:
                print(f"{'':<15} -> {finding.next_step}", flush=True)
    num_failed, num_warned = (sum(finding.status == status for finding in findings) for status in (FAIL, WARN))
    if arguments.json:
        print(json.dumps({"ok": num_failed == 0, "findings": [dataclasses.asdict(finding) for finding in findings]}))
    else:
        print(f"\n{num_failed} to mend, {num_warned} to know" if num_failed or num_warned else "\nall is well")
    return 1 if num_failed else 0


COMMAND = Command(
    usage="[--json] [--config FILE] [flags of serve]",
    summary="Checks versions, devices, memory, disk, ports, certificates and the model, and says what to do next.",
    add_arguments=add_arguments,
    run=run,
    epilog="""\
examples:
  jserve doctor
  jserve doctor --config configs/tpu.toml --model ./llama --port 8000      what `serve` would meet with these flags
  jserve doctor --json | jq '.findings[] | select(.status != "ok")'

Exit code 0 where nothing is to mend (there may be warnings), 1 otherwise.  Nothing is fetched, started or changed.""",
)
