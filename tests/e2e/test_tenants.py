"""One tenant's flood beside another's requests, in seconds: a real server of SmolLM2 and two client processes.

In steps, on every run of the tests: tests/http/test_real_engine.py.  `make soak PYTEST_ARGS="-k two_clients"`; a minute or two
on a quiet machine.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jserve.server.client import Client
from tests.support.auth import BLUE, RED, auth_file
from tests.support.served import served
from tests.support.smollm2 import smollm2_gguf

LIMITS = "[tenant.red]\nmax_running = 1\n"
ROUNDS = 3


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_flood_of_one_of_two_clients_leaves_the_other_within_twice_its_latency(tmp_path):
    tokens = {name: tmp_path / name for name in ("red", "blue")}
    tokens["red"].write_text(RED)
    tokens["blue"].write_text(BLUE)
    flags = [
        "--model", str(smollm2_gguf()), "--port", "0", "--auth-file", auth_file(tmp_path, LIMITS),
        "--kv.memory_bytes", "268435456", "--max-num-seqs", "16", "--max-num-batched-tokens", "64",
    ]  # fmt: skip
    with served(flags, tmp_path / "log") as server:
        alone, limited, unlimited = [], [], []
        for _ in range(ROUNDS):  # in turns: what else runs on the machine hits all of them
            alone.append(_latency(server.address, tokens["blue"]))
            with _flood(server.address, tokens["red"], tmp_path / "red.log"):
                limited.append(_latency(server.address, tokens["blue"]))
                auth_file(tmp_path)  # the running server reads it again
                unlimited.append(_latency(server.address, tokens["blue"]))
                auth_file(tmp_path, LIMITS)
    print(f"\nmedian end-to-end ms of blue, round by round: alone {alone}, beside a flood of 16 with a limit of "
          f"1 running {limited}, without a limit {unlimited}")
    # The least of the rounds: what else the machine does can only add to a latency, and never the same to each.
    ratio, without = (min(some) / min(alone) for some in (limited, unlimited))
    print(f"with the limit {ratio:.2f}x, without {without:.2f}x")
    assert ratio <= 2 < without


def _bench(address: str, token: Path, *flags: str) -> list[str]:
    return [
        sys.executable, "-m", "jserve.cli.main", "bench", "serve", "--address", address, "--token-file", str(token),
        "--random-input-len", "48", "--random-output-len", "16", "--max-client-lag-ms", "inf",
        "--stall-timeout-s", "600", "--json", *flags,
    ]  # fmt: skip


def _latency(address: str, token: Path) -> float:
    """Median end-to-end latency of one request at a time, in ms."""
    done = subprocess.run(
        _bench(address, token, "--max-concurrency", "1", "--num-prompts", "4"), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return round(json.loads(done.stdout)["median_e2el_ms"])


@contextlib.contextmanager
def _flood(address: str, token: Path, log: Path) -> Iterator[None]:
    """Sixteen requests at once, as long as it is open."""
    with log.open("w") as output:
        flags = ("--max-concurrency", "16", "--num-prompts", "2000", "--num-warmups", "0")
        process = subprocess.Popen(_bench(address, token, *flags), stdout=output, stderr=output)
        try:
            with Client(address, token=RED) as client:
                while not client.loads().num_running:
                    assert process.poll() is None, log.read_text()
                    time.sleep(0.1)
            yield
        finally:
            process.terminate()
            process.wait()
