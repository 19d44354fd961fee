"""Servers beside each other: started once, measured in turn, and stopped in the operating system's sense meanwhile.

A server that waits is paused (SIGSTOP), so that its idle threads take nothing from the one that is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jserve import __version__
from jserve.bench.http_client import HttpClient
from jserve.bench.target import Target
from jserve.request import RequestError
from jserve.server.async_client import AsyncClient
from tools.peers import environments

NAME = "smollm2"
POLL_S = 0.2


class NotReady(RuntimeError):
    """A server that did not come up in time, or died; the message says where its output is."""


@dataclass(frozen=True)
class Launch:
    """How to start an engine and where it then is."""

    name: str
    command: Sequence[str]
    target: Target
    version: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Running:
    launch: Launch
    process: subprocess.Popen
    ready_s: float

    def pause(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)


def jserve(model: str, dtype: str, max_num_seqs: int, context: int, flags: Sequence[str]) -> Launch:
    port = _free_port()
    command = [
        sys.executable, "-m", "jserve.cli.main", "serve", "--model", model, "--port", str(port),
        "--max-num-seqs", str(max_num_seqs), "--context", str(context), "--served-name", NAME, *flags,
    ]
    if dtype != "int8":
        command += ["--dtype", dtype]
    label = "jserve " + dtype
    return Launch(label, command, Target("jserve", f"127.0.0.1:{port}"), __version__)


def vllm(folder: Path, model: Path, dtype: str, max_num_seqs: int, context: int) -> Launch:
    python, port = environments.vllm(folder), _free_port()
    cores = os.cpu_count() or 1
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", NAME,
        "--dtype", dtype, "--port", str(port), "--host", "127.0.0.1", "--max-model-len", str(context),
        "--max-num-seqs", str(max_num_seqs),
    ]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
        # By itself it leaves a core to the front end; on a small machine all of them compute faster.
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}",
    }
    target = Target("openai", f"http://127.0.0.1:{port}", NAME)
    return Launch(f"vLLM {dtype}", command, target, environments.version(python, "vllm-cpu"), environment)


def llama_cpp(folder: Path, gguf: Path, max_num_seqs: int, context: int) -> Launch:
    binary, port = environments.llama_server(folder), _free_port()
    command = [
        str(binary), "-m", str(gguf), "--host", "127.0.0.1", "--port", str(port), "--parallel", str(max_num_seqs),
        "--ctx-size", str(context * max_num_seqs), "--threads", str(os.cpu_count()), "--alias", NAME,
    ]
    version = "llama-cpp-python " + (folder / "llama.cpp" / "version").read_text().strip()
    return Launch("llama.cpp Q4_1", command, Target("openai", f"http://127.0.0.1:{port}", NAME), version)


@contextlib.asynccontextmanager
async def running(launch: Launch, log: Path, timeout_s: float) -> AsyncIterator[Running]:
    """The server, ready, until the block ends."""
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            launch.command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **launch.environment},
        )
    try:
        while not await _is_ready(launch.target):
            if process.poll() is not None or time.perf_counter() - began > timeout_s:
                state = f"status {process.poll()}" if process.poll() is not None else f"not ready in {timeout_s:g} s"
                raise NotReady(f"{launch.name}: {state}; its output is in {log}")
            await asyncio.sleep(POLL_S)
        yield Running(launch, process, time.perf_counter() - began)
    finally:
        _end(process)


async def _is_ready(target: Target) -> bool:
    try:
        if target.backend == "jserve":
            async with AsyncClient(target.address) as client:
                return await client.is_serving()
        client = HttpClient(target.address)
        try:
            return await client.answers("/health")
        finally:
            await client.close()
    except RequestError:
        return False


def _end(process: subprocess.Popen, grace_s: float = 15.0) -> None:
    """SIGTERM to the whole group, which may be paused, then SIGKILL."""
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
            os.killpg(process.pid, signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
