"""An event loop whose clock jumps to the next timer: seconds pass in no time, and every figure comes out exact."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any


class _JumpingSelector(selectors.SelectSelector):
    """Never waits: what it would have waited is added to the clock."""

    def __init__(self):
        super().__init__()
        self.now = 1000.0

    def select(self, timeout=None):
        if timeout is None:
            raise AssertionError("everything waits, and nothing will ever happen")
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self):
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._jumping.now


def run_virtually(work: Awaitable[Any], monkeypatch, *modules) -> Any:
    """The result of a coroutine; `time.perf_counter` of the modules is the loop's clock."""
    loop = VirtualLoop()
    clock = SimpleNamespace(perf_counter=loop.time, process_time=lambda: 0.0, time=loop.time, monotonic=loop.time)
    for module in modules:
        monkeypatch.setattr(module, "time", clock)
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()
