"""Who comes when, with how many tokens: arrivals and lengths, from a distribution or from a trace."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jserve.bench import trace
from jserve.bench.arrivals import arrival_times

__all__ = ["Lengths", "SimRequest", "StallLoad", "arrival_times", "lognormal_lengths", "read_trace", "uniform_lengths"]


@dataclass(frozen=True)
class SimRequest:
    """`number` is unique; `shared` leading prompt tokens are equal in all requests of one `group`."""

    number: int
    arrival: float
    prompt: int
    output: int
    priority: int = 0
    tenant: str = ""
    group: int = 0
    shared: int = 0

    @property
    def total(self) -> int:
        return self.prompt + self.output


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and outputs, in order."""

    prompts: np.ndarray
    outputs: np.ndarray

    def requests(self, arrivals: Iterable[float]) -> list[SimRequest]:
        return [
            SimRequest(number, float(arrival), int(prompt), int(output))
            for number, (arrival, prompt, output) in enumerate(zip(arrivals, self.prompts, self.outputs))
        ]


def uniform_lengths(count: int, prompt: int, output: int, ratio: float, seed: int) -> Lengths:
    """As `--random-input-len --random-output-len --random-range-ratio` of the bench."""
    random = np.random.default_rng(seed)

    def draw(mean: int) -> np.ndarray:
        return random.integers(max(1, int(mean * (1 - ratio))), int(mean * (1 + ratio)) + 1, count)

    return Lengths(draw(prompt), draw(output))


def lognormal_lengths(
    count: int,
    seed: int,
    *,
    context: int,
    prompt: tuple[float, float] = (1730, 5696),
    output: tuple[float, float] = (415, 834),
) -> Lengths:
    """Skewed lengths, each given as (median, 90th percentile); the defaults are those of openchat_sharegpt4, as
    Sarathi-Serve reports them.  Clipped so that prompt + output fit the context."""
    random = np.random.default_rng(seed)

    def draw(median: float, p90: float, most: int) -> np.ndarray:
        sigma = math.log(p90 / median) / 1.2816
        return np.clip(np.rint(random.lognormal(math.log(median), sigma, count)), 1, most).astype(int)

    outputs = draw(*output, context // 2)
    return Lengths(np.minimum(draw(*prompt, context - 1), context - outputs), outputs)


def read_trace(path: str | Path) -> tuple[list[SimRequest], bool]:
    """(requests, whether all have arrival times) of a file that `bench.trace` reads."""
    rows = trace.read(path)
    requests = [
        SimRequest(number, row.start_s or 0.0, row.prompt_tokens, row.output_tokens) for number, row in enumerate(rows)
    ]
    return requests, rows[0].start_s is not None


@dataclass(frozen=True)
class StallLoad:
    """Streams that decode all the time, and a long prompt every few seconds: what chunked prefill is for."""

    streams: int = 32
    context: int = 10_000
    """Tokens that a stream begins with."""
    long_prompt: int = 32_768
    every_s: float = 3.0
    num_long: int = 20
    begin_s: float = 60.0
    """When the first long prompt comes: all streams decode by then."""

    @property
    def end_s(self) -> float:
        return self.begin_s + self.num_long * self.every_s

    def requests(self, stream_output: int) -> list[SimRequest]:
        """Streams first (numbers below `streams`), then the long prompts."""
        streams = [SimRequest(number, 0.0, self.context, stream_output) for number in range(self.streams)]
        return streams + [
            SimRequest(self.streams + k, self.begin_s + k * self.every_s, self.long_prompt, 1)
            for k in range(self.num_long)
        ]
