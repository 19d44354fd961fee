"""Compiles the plan ahead of time, in threads and into a persistent cache, and counts what is compiled later.

`Programs` maps a shape to its executable; the executables are called directly, so serving cannot compile by accident.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts XLA compiles of this process after `mark_ready()`; jax tells of each one.

    With `forbid` a later compile raises where it happens, instead of being counted only.
    """

    def __init__(self) -> None:
        self._ready = False
        self._forbid = False
        self.num_after_ready = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def mark_ready(self, forbid: bool = False) -> None:
        self._ready, self._forbid = True, forbid

    def _on_event(self, event: str, duration_s: float, **_: Any) -> None:
        if self._ready and event == _COMPILE_EVENT:
            self.num_after_ready += 1
            if self._forbid:
                raise RuntimeError("a program was compiled after readiness, which compile.forbid_compile forbids")


def use_persistent_cache(folder: str) -> None:
    """Every compile is kept in `folder` and found there by the next start."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def compile_all(
    jobs: dict[Any, Callable[[], jax.stages.Lowered]],
    num_threads: int,
    progress: Callable[[int, int, str], None],
    options: dict[str, str] | None = None,
) -> dict[Any, jax.stages.Compiled]:
    """Lowers and compiles every job, several at a time.

    Args:
      jobs: shape -> function that lowers its program.
      progress: called with (done, total, what was just compiled).
    Returns:
      shape -> executable, in the order of `jobs`.
    """
    lock = threading.Lock()
    done = 0

    def compile_one(item: tuple[Any, Callable[[], jax.stages.Lowered]]) -> tuple[Any, jax.stages.Compiled]:
        nonlocal done
        shape, lower = item
        began = time.perf_counter()
        compiled = lower().compile(compiler_options=options)
        with lock:
            done += 1
            progress(done, len(jobs), f"{shape} {time.perf_counter() - began:.1f} s")
        return shape, compiled

    with ThreadPoolExecutor(num_threads, thread_name_prefix="jserve-compile") as threads:
        return dict(threads.map(compile_one, jobs.items()))
