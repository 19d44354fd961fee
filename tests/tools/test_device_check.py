"""tools/device_check.py where there is no accelerator: it says so, and its rehearsal runs every section but the whole steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[2] / "tools" / "device_check.py"


def run(*arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, env=environment, timeout=280
    )


def test_without_an_accelerator_it_says_so():
    finished = run()
    assert finished.returncode == 2
    assert "no accelerator" in finished.stderr and "Nothing was checked" in finished.stderr


def test_rehearsal_has_a_row_for_everything_and_nothing_fails():
    finished = run("--rehearse", "--skip", "steps")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    report = json.loads(finished.stdout.splitlines()[-1])
    assert report["rehearsal"]
    assert {row["section"] for row in report["rows"]} == {"rates", "numerics", "decode", "chunks"}
    assert all(row["ok"] for row in report["rows"])
    assert len(report["left_out"]) == 1
