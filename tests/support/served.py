"""`jserve serve` in a process of its own, as a user runs it: its address, its memory, its end."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Served:
    process: subprocess.Popen
    address: str
    http_url: str | None

    def resident_bytes(self) -> int:
        """0 once the process has ended."""
        status = Path(f"/proc/{self.process.pid}/status")
        for line in status.read_text().splitlines() if status.exists() else ():
            if line.startswith("VmRSS:"):
                return 1024 * int(line.split()[1])
        return 0


def growth_of(samples: Sequence[int], warm_share: float) -> tuple[float, float]:
    """(early, late) bytes: means of the first and last quarter of what was seen after `warm_share` of the time."""
    counted = samples[int(warm_share * len(samples)) :]
    quarter = max(1, len(counted) // 4)
    return sum(counted[:quarter]) / quarter, sum(counted[-quarter:]) / quarter


@contextlib.contextmanager
def served(flags: Sequence[str], log: Path) -> Iterator[Served]:
    """A server that is ready; killed at the end if it still runs.  stderr goes to `log`."""
    with log.open("w") as stderr:
        process = subprocess.Popen([sys.executable, "-m", "jserve.cli.main", "serve", *flags], stderr=stderr)
        try:
            yield Served(process, *_addresses(log, process))
        finally:
            process.kill()
            process.wait()


def _addresses(log: Path, process: subprocess.Popen) -> tuple[str, str | None]:
    """From the line that says the server is ready."""
    end = time.monotonic() + 900  # it may share its cores; a test has a limit of its own
    while time.monotonic() < end and process.poll() is None:
        if found := re.search(r"^ready after .* gRPC on ([^;]+)(?:; HTTP on ([^;]+))?;", log.read_text(), re.MULTILINE):
            return found[1], found[2]
        time.sleep(0.2)
    raise AssertionError(log.read_text())
