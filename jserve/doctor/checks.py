"""All checks, in the order in which they matter; one that breaks is a finding, not the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jserve.config import Config
from jserve.doctor.devices import check_devices
from jserve.doctor.finding import FAIL, Finding
from jserve.doctor.machine import check_cache, check_files, check_memory, check_model, check_server
from jserve.doctor.packages import check_packages, check_python


def run_checks(config: Config) -> Iterator[Finding]:
    """Findings as they come; the devices last, for they take seconds."""
    checks: dict[str, Callable[[], list[Finding]]] = {
        "python": check_python,
        "packages": check_packages,
        "memory": check_memory,
        "cache": lambda: check_cache(config),
        "files": lambda: check_files(config),
        "server": lambda: check_server(config),
        "model": lambda: check_model(config),
        "devices": lambda: check_devices(config.parallel.tensor_parallel_size),
    }
    for name, check in checks.items():
        try:
            yield from check()
        except Exception as error:
            yield Finding(name, FAIL, f"the check itself failed: {type(error).__name__}: {error}")
