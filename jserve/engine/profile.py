"""Traces of jax.profiler while the engine serves: device and host timelines for Perfetto, TensorBoard or XProf."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax

from jserve.request import Code, RequestError, invalid

POLL_S = 0.005


class Profiler:
    """One trace at a time; `start` and `stop` block, for as long as the profiler takes to write, on any thread."""

    def __init__(self, default_folder: str | Path, num_steps: Callable[[], int]):
        """`num_steps()` counts the steps since start."""
        self._default_folder = Path(default_folder)
        self._num_steps = num_steps
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._number = 0

    def start(self, folder: str | None = None, num_steps: int | None = None) -> str:
        """Begins a trace; the folder that it will be written to.  It stops by itself after `num_steps` more steps.

        Raises:
          RequestError: FAILED_PRECONDITION where one runs already, INVALID_ARGUMENT where the folder cannot be made.
        """
        if num_steps is not None and num_steps < 1:
            raise invalid("num_steps", num_steps, "must be 1 or larger")
        target = Path(folder) if folder else self._default_folder / time.strftime("%Y%m%d-%H%M%S")
        with self._lock:
            if self._folder is not None:
                raise RequestError(Code.FAILED_PRECONDITION, f"a profile is being written to {self._folder}")
            try:
                target.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise invalid("output_dir", str(target), error.strerror or "cannot be made") from None
            jax.profiler.start_trace(str(target))
            self._folder = target
            self._number += 1
            number, last = self._number, self._num_steps() + (num_steps or 0)
        if num_steps is not None:
            watch = threading.Thread(target=self._stop_after, args=(number, last), name="jserve-profile", daemon=True)
            watch.start()
        return str(target)

    def stop(self) -> str:
        """Writes the trace; its folder.  FAILED_PRECONDITION where none runs."""
        with self._lock:
            if self._folder is None:
                raise RequestError(Code.FAILED_PRECONDITION, "no profile is running")
            folder, self._folder = self._folder, None
            jax.profiler.stop_trace()
        return str(folder)

    def close(self) -> None:
        """Writes what runs, if anything does."""
        try:
            self.stop()
        except RequestError:
            pass

    def _stop_after(self, number: int, last_step: int) -> None:
        while self._is_running(number):
            if self._num_steps() >= last_step:
                self.close()
                return
            time.sleep(POLL_S)

    def _is_running(self, number: int) -> bool:
        with self._lock:
            return self._folder is not None and self._number == number
