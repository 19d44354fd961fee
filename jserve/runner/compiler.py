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
    """Counts the XLA compiles that one thread, the engine's, causes; jax tells of each one.

    With `forbid` such a compile raises where it happens, instead of being counted only.
    """

    def __init__(self, forbid: bool = False) -> None:
        self.num_after_ready = 0
        self._forbid = forbid
        self._thread: int | None = None

    def watch_this_thread(self) -> None:
        """Called by the engine thread when it starts to serve."""
        self._thread = threading.get_ident()
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def stop(self) -> None:
        """Called by the same thread when it ends."""
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _on_event(self, event: str, duration_s: float, **_: Any) -> None:
        if event == _COMPILE_EVENT and threading.get_ident() == self._thread:
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
