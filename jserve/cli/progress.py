"""What a person sees while the engine starts: lines as they come, a bar for a phase that takes a while.

`line(text)` and `progress(phase, done, total)` are what `jserve.engine.build` calls, from any thread.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

LINE_EVERY_S = 5.0
"""Seconds between progress lines where there is no terminal to draw a bar on."""


class StartReport:
    """Writes to `stream` (stderr unless given), and keeps `seconds` by phase for `bench startup`.

    A phase begins when the line or phase before it ends, and ends with done == total.
    """

    def __init__(self, stream: TextIO | None = None, quiet: bool = False):
        self.seconds: dict[str, float] = {}
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._began: dict[str, float] = {}
        self._last_event = time.perf_counter()
        self._last_line = 0.0
        self._bar = None
        self._task = None
        self._lock = threading.Lock()

    def line(self, text: str) -> None:
        """One line that stays, above the bar where one is drawn."""
        with self._lock:
            self._last_event = time.perf_counter()
            if self._quiet:
                return
            if self._bar is not None:
                self._bar.console.print(text, markup=False, highlight=False)
            else:
                print(text, file=self._stream, flush=True)

    __call__ = line

    def progress(self, phase: str, done: int, total: int) -> None:
        """`done` of `total` parts of a phase are finished, e.g. ("compile", 3, 14)."""
        now = time.perf_counter()
        with self._lock:
            began = self._began.setdefault(phase, self._last_event)
            self._last_event = now
            self.seconds[phase] = now - began
            if self._quiet:
                return
            if self._stream.isatty():
                self._draw(phase, done, total)
            elif done >= total or now - max(self._last_line, began) >= LINE_EVERY_S:
                self._last_line = now
                print(f"{phase}: {_share(done, total)} in {now - began:.1f} s", file=self._stream, flush=True)

    def close(self) -> None:
        """Takes the bar away; lines after it are plain again."""
        with self._lock:
            self._stop_bar()

    def _draw(self, phase: str, done: int, total: int) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[so_far]}"),
                TimeElapsedColumn(),
            )
            self._bar = Progress(*columns, console=Console(file=self._stream), transient=True)
            self._task = self._bar.add_task(phase, total=total, so_far="")
            self._bar.start()
        self._bar.update(self._task, description=phase, completed=done, total=total, so_far=_share(done, total))
        if done >= total:
            self._stop_bar()
            print(f"{phase}: {_share(total, total)} in {self.seconds[phase]:.1f} s", file=self._stream, flush=True)

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _share(done: int, total: int) -> str:
    """Counts as they are; what can only be bytes in MB."""
    is_bytes = total >= 10_000_000
    amount = f"{total / 1e6:,.0f} MB" if is_bytes else str(total)
    if done >= total:
        return amount
    return f"{done / 1e6:,.0f} of {amount}" if is_bytes else f"{done}/{amount}"
