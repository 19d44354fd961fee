"""Compiles the plan ahead of time, in threads, and counts what is compiled later.

`Programs` maps a shape to its executable; the executables are called directly, so serving cannot compile by accident.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jserve.runner.executable_store import ExecutableStore

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


@functools.cache
def understands(option: str, value: Any, device: jax.Device | None = None) -> bool:
    """Whether the compiler for a device, which need not be here, knows an option; they come and go with jax's versions."""
    place = SingleDeviceSharding(device or jax.devices()[0])
    try:
        number = jax.ShapeDtypeStruct((), "int32", sharding=place)
        jax.jit(lambda x: x + 1).lower(number).compile(compiler_options={option: value})
    except jax.errors.JaxRuntimeError:
        return False
    return True


def compile_all(
    jobs: dict[Any, Callable[[], jax.stages.Lowered]],
    num_threads: int,
    progress: Callable[[int, int], None],
    store: ExecutableStore | None = None,
    options: Callable[[Any], Mapping[str, Any]] = lambda program: {},
    devices: Sequence[jax.Device] | None = None,
) -> dict[Any, jax.stages.Compiled]:
    """An executable for every job, several at a time: from the store where it has one, else lowered and compiled.

    Args:
      jobs: program (its str is its name) -> function that lowers it.
      progress: called with (done, total).
      options: compiler options of a program.
      devices: where the executables are to run; None is jax's default device.
    Returns:
      program -> executable, in the order of `jobs`.
    """
    devices = devices or jax.devices()[:1]
    lock = threading.Lock()
    done = 0

    def compile_one(item: tuple[Any, Callable[[], jax.stages.Lowered]]) -> tuple[Any, jax.stages.Compiled]:
        nonlocal done
        program, lower = item
        compiled = None if store is None else store.load(str(program), devices)
        if compiled is None:
            compiled = lower().compile(compiler_options=_understood(options(program), devices[0]))
            if store is not None:
                store.save(str(program), compiled)
        with lock:
            done += 1
            progress(done, len(jobs))
        return program, compiled

    with ThreadPoolExecutor(num_threads, thread_name_prefix="jserve-compile") as threads:
        executables = dict(threads.map(compile_one, jobs.items()))
    if store is not None:
        store.close()
    return executables


def _understood(options: Mapping[str, Any], device: jax.Device) -> dict[str, Any]:
    return {option: value for option, value in options.items() if understands(option, value, device)}
