"""Which devices jax finds, whether they compute, and devices of this machine that jax does not use.

jax starts in a child process with a time limit: a TPU that another process holds can make it wait for ever.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from jserve.doctor.finding import FAIL, OK, WARN, Finding

TIME_LIMIT_S = 180.0
_PROBE = """
import json, sys
import jax, jax.numpy as jnp
devices = jax.devices()
x = jnp.ones((128, 128))
value = float((x @ x).sum())
stats = devices[0].memory_stats() or {}
print("probe " + json.dumps({"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices),
    "sum": value, "bytes_limit": stats.get("bytes_limit"), "bytes_in_use": stats.get("bytes_in_use")}))
"""
_CHANGES_RESULTS = ("JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_NUMPY_DTYPE_PROMOTION", "JAX_DISABLE_JIT")


def check_devices(tensor_parallel_size: int = 1) -> list[Finding]:
    found, problem = _probe()
    if found is None:
        return [Finding("devices", FAIL, f"jax does not start: {problem}", _after_failed_start(problem))]
    return judge(found, tensor_parallel_size, os.environ, hardware())


def judge(
    found: Mapping[str, object], tensor_parallel_size: int, environment: Mapping[str, str], there: frozenset[str]
) -> list[Finding]:
    """Findings about what the probe printed; `there` is the hardware that the operating system shows."""
    platform, count = found["platform"], found["count"]
    limit = found.get("bytes_limit")
    memory = f", {limit / 2**30:.1f} GiB each" if limit and platform != "cpu" else ""
    findings = [Finding("devices", OK, f"{count} x {found['kind']} ({platform}){memory}")]
    if found["sum"] != 128.0**3:
        findings.append(Finding("devices", FAIL, f"a product of ones is {found['sum']}, not {128.0**3}",
                                "the device or its driver computes wrongly: run its vendor's diagnosis"))
    if platform not in ("cpu", "gpu", "tpu"):
        findings.append(Finding("devices", FAIL, f"jax runs on {platform!r}; cpu, gpu and tpu are supported",
                                "unset JAX_PLATFORMS"))
    if tensor_parallel_size > count:
        findings.append(Finding("devices", FAIL, f"parallel.tensor_parallel_size = {tensor_parallel_size}, "
                                f"and there are {count} devices", f"--tensor-parallel-size {count}"))
    findings += [Finding("devices", WARN, *one) for one in unused(platform, environment, there)]
    in_use = found.get("bytes_in_use")
    if limit and platform == "gpu" and in_use and in_use > 0.1 * limit:
        text = f"{in_use / 2**30:.1f} GiB of the GPU are in use already"
        findings.append(Finding("devices", WARN, text, "nvidia-smi shows by whom"))
    for name in _CHANGES_RESULTS:
        if environment.get(name):
            text = f"{name} is set: results may differ from jserve's"
            findings.append(Finding("devices", WARN, text, f"unset {name}"))
    return findings


def unused(
    platform: str, environment: Mapping[str, str], there: frozenset[str] | None = None
) -> list[tuple[str, str]]:
    """(what is wrong, what to do) for each accelerator of this machine while jax computes on the CPU."""
    if platform != "cpu":
        return []
    chosen = environment.get("JAX_PLATFORMS")
    installs = {"gpu": "pip install 'jax[cuda13]'", "tpu": "pip install 'jax[tpu]'"}
    return [
        (f"a {kind.upper()} is here, and jax does not use it",
         f"unset JAX_PLATFORMS (it is {chosen})" if chosen else f"{install}, or see what `jserve doctor` says")
        for kind, install in installs.items() if kind in (hardware() if there is None else there)
    ]


def hardware() -> frozenset[str]:
    """gpu and tpu, as device files show them."""
    found = set()
    if Path("/dev/nvidia0").exists():
        found.add("gpu")
    if Path("/dev/accel0").exists() or _is_tpu_behind_vfio():
        found.add("tpu")
    return frozenset(found)


def _is_tpu_behind_vfio() -> bool:
    """From v6e on, TPUs are PCI devices of Google's (vendor 1ae0) that user space drives."""
    if not Path("/dev/vfio").is_dir():
        return False
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    classes = ((path.read_text().strip(), (path.parent / "class").read_text().strip()) for path in vendors)
    return any(vendor == "0x1ae0" and kind.startswith(("0x12", "0x0880")) for vendor, kind in classes)


def _probe() -> tuple[dict | None, str]:
    """(what the child printed, "") or (None, what went wrong)"""
    # The probe must not take the memory that a running server wants.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=TIME_LIMIT_S, env=environment
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer in {TIME_LIMIT_S:g} s"
    for line in done.stdout.splitlines():
        if line.startswith("probe "):
            return json.loads(line.removeprefix("probe ")), ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return None, lines[-1].strip() if lines else f"exit status {done.returncode}"


def _after_failed_start(problem: str) -> str:
    if "no answer" in problem or "already in use" in problem.lower():
        return "another process may hold the device: find it with `sudo lsof /dev/accel* /dev/vfio/* /dev/nvidia*`"
    if "unknown backend" in problem.lower() or "JAX_PLATFORMS" in problem:
        return "unset JAX_PLATFORMS, or install that platform: pip install 'jax[tpu]' or 'jax[cuda13]'"
    return f"{sys.executable} -c 'import jax; print(jax.devices())' shows all of it"
