"""A step as the simulator sees it, the seam that every simulated system implements, and what a step costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from jserve.config import ConfigError
from jserve.planner.roofline import Roofline
from jserve.simulator.workload import SimRequest


@dataclass(frozen=True)
class SimStep:
    """Rows of one step; arrays have one entry a row."""

    rows: np.ndarray  # places in the picture
    numbers: list[int]  # requests
    granted: np.ndarray  # tokens
    past: np.ndarray  # computed before
    num_tokens: int  # that the device computes, padding included
    about: object = None  # the system's own

    @property
    def num_useful(self) -> int:
        return int(self.granted.sum())


@dataclass
class Outcome:
    """What a step brought: requests that got a token, and those that ended with it."""

    emitted: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)


class System(Protocol):
    """Decides steps.  `depth` steps may be in flight when it plans the next."""

    name: str
    num_rows: int
    depth: int

    def add(self, request: SimRequest) -> bool:
        """Queues it; False where it can never be held."""

    def schedule(self, now: float) -> SimStep | None: ...

    def apply(self, step: SimStep, now: float, seconds: float) -> Outcome:
        """The oldest step is done, after `seconds` of device time."""

    @property
    def has_work(self) -> bool: ...


StepSeconds = Callable[[SimStep], float]


def roofline_seconds(roofline: Roofline) -> StepSeconds:
    return lambda step: roofline.step(step.granted, step.past, step.num_tokens).seconds


def one_second(step: SimStep) -> float:
    """Every step takes one second: times are then step numbers."""
    return 1.0


def table_seconds(path: str | Path) -> StepSeconds:
    """A measured table: `{"tokens_ms": [[1, 5.1], [512, 9.8], ...], "context_ms_per_1k": 0.01}`; linear between
    and beyond the points, plus so much for every 1,000 tokens of context that the step reads."""
    try:
        table = json.loads(Path(path).read_text())
        points = sorted((float(tokens), float(ms)) for tokens, ms in table["tokens_ms"])
        per_context = float(table.get("context_ms_per_1k", 0.0)) / 1e6
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f'{path}: {error}; expected {{"tokens_ms": [[1, 5.1], [512, 9.8]], ...}}') from None
    if len(points) < 2:
        raise ConfigError(f"{path}: tokens_ms needs two points or more")
    tokens, ms = np.array(points).T

    def seconds(step: SimStep) -> float:
        beyond = max(0.0, step.num_tokens - tokens[-1]) * (ms[-1] - ms[-2]) / (tokens[-1] - tokens[-2])
        base = float(np.interp(step.num_tokens, tokens, ms)) + beyond
        return base / 1e3 + per_context * float((step.past + step.granted).sum())

    return seconds
