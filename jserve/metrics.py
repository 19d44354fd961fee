"""Counters of an engine, as plain numbers that any thread may read.

The engine thread writes; `jserve.server.metrics_page` renders them for Prometheus and `GetLoads` for gRPC.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StepTimes:
    """Totals over all steps since start."""

    num_steps: int = 0
    host_seconds: float = 0.0
    """Time of schedule + build + launch + apply on the engine thread."""
    device_seconds: float = 0.0
    """Time from launch to the result, of steps that ran alone; with overlap, from one result to the next."""
    scheduled_tokens: int = 0
    padded_tokens: int = 0
    generated_tokens: int = 0

    def record(self, plan, output, *, host_s: float) -> None:
        """Adds one step (a `StepPlan` and its `StepOutput`)."""
        self.num_steps += 1
        self.host_seconds += host_s
        self.device_seconds += output.device_seconds
        self.scheduled_tokens += plan.num_tokens
        self.padded_tokens += plan.bucket - plan.num_tokens
        self.generated_tokens += len(output.token_ids)


@dataclass
class RequestCounts:
    """Requests by outcome; accepted == finished + aborted + failed + in flight at any time."""

    accepted: int = 0
    refused: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens: int = 0

    @property
    def in_flight(self) -> int:
        return self.accepted - self.finished - self.aborted - self.failed
