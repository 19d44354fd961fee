"""Whether the client itself kept up: how late it woke, how late it sent, and how much of a core it used.

A client that lags adds its own lateness to every figure, so a report is refused where the lag is not small against
what was measured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

TICK_S = 0.02
MAX_CPU_SHARE = 0.9
"""Of one core: a client that is busy all the time hears tokens when it gets to them, not when they come."""
LEAST_LIMIT_MS = 25.0
"""Wake-ups as late as this happen on any machine whose cores are busy."""


@dataclass(frozen=True)
class Lag:
    """Of one client process, in seconds."""

    wake_s: tuple[float, ...] = ()
    """How late each tick of its event loop came."""
    send_s: tuple[float, ...] = ()
    """How late each request with a time of its own was sent."""
    cpu_share: float = 0.0


class LagMeter:
    """Ticks in the client's event loop; what delays a tick delays a token's arrival as much."""

    def __init__(self):
        self._wake: list[float] = []
        self._send: list[float] = []
        self._began = time.perf_counter()
        self._cpu = time.process_time()

    async def run(self) -> None:
        while True:
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            self._wake.append(max(0.0, time.perf_counter() - due))

    def sent(self, record) -> None:
        if record.due is not None:
            self._send.append(max(0.0, record.start - record.due))

    def lag(self) -> Lag:
        wall = time.perf_counter() - self._began
        share = (time.process_time() - self._cpu) / wall if wall > 0 else 0.0
        return Lag(tuple(self._wake), tuple(self._send), share)


def figures(lags: Sequence[Lag]) -> dict[str, object]:
    """The report's `client`: over all client processes."""
    wake = [1e3 * late for lag in lags for late in lag.wake_s]
    send = [1e3 * late for lag in lags for late in lag.send_s]
    return {
        "processes": len(lags),
        "max_cpu_share": max((lag.cpu_share for lag in lags), default=0.0),
        "p99_wake_lag_ms": float(np.percentile(wake, 99)) if wake else 0.0,
        "max_wake_lag_ms": max(wake, default=0.0),
        "p99_send_lag_ms": float(np.percentile(send, 99)) if send else 0.0,
    }


def bottleneck(report: Mapping[str, object], limit_ms: float | None = None) -> str | None:
    """Why the figures say more of the client than of the server; None where they do not.

    Args:
      limit_ms: largest P99 of the client's lag; unless given a quarter of the median TPOT, at least 25 ms.
    """
    client = report["client"]
    if limit_ms is None:
        limit_ms = max(LEAST_LIMIT_MS, 0.25 * (report.get("median_tpot_ms") or 0.0))
    if client["max_cpu_share"] > MAX_CPU_SHARE:
        return f"a client process used {client['max_cpu_share']:.0%} of a core"
    for name, what in (("p99_wake_lag_ms", "woke"), ("p99_send_lag_ms", "sent requests")):
        if client[name] > limit_ms and not (name == "p99_send_lag_ms" and report.get("max_concurrency")):
            return f"the client {what} {client[name]:.1f} ms late (P99; the limit is {limit_ms:.1f} ms)"
    return None
