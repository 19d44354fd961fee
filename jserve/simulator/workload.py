"""Who comes when, with how many tokens: arrivals and lengths, from a distribution or from a trace."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jserve.config import ConfigError


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


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> np.ndarray:
    """Seconds of `count` arrivals at `rate` a second, gaps gamma distributed: burstiness 1 is Poisson, less: burstier.
    An infinite rate: all at once."""
    if math.isinf(rate):
        return np.zeros(count)
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count)
    return np.cumsum(gaps) - gaps[0]


PROMPT_KEYS = ("prompt_tokens", "input_len", "prompt_len", "input_length", "ContextTokens")
OUTPUT_KEYS = ("output_tokens", "output_len", "completion_tokens", "output_length", "GeneratedTokens")
ARRIVAL_KEYS = ("arrival", "arrival_s", "timestamp")


def read_trace(path: str | Path) -> tuple[list[SimRequest], bool]:
    """One request a line, JSON: `{"prompt_tokens": 120, "output_tokens": 64, "arrival": 0.5}`; (requests, whether all
    have arrival times).

    Raises:
      ConfigError: naming file, line and what was expected.
    """
    rows: list[tuple[int, int, float | None]] = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            rows.append(_row(json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{path}:{number}: {error}; expected a line such as"
                ' {"prompt_tokens": 120, "output_tokens": 64, "arrival": 0.5}'
            ) from None
    if not rows:
        raise ConfigError(f"{path}: holds no request")
    timed = all(arrival is not None for _, _, arrival in rows)
    if timed:
        rows.sort(key=lambda row: row[2])
    begin = rows[0][2] if timed else 0.0
    requests = [
        SimRequest(number, arrival - begin if timed else 0.0, prompt, output)
        for number, (prompt, output, arrival) in enumerate(rows)
    ]
    return requests, timed


def _row(line: object) -> tuple[int, int, float | None]:
    if not isinstance(line, dict):
        raise ValueError("not an object")

    def find(keys: Sequence[str], default=None):
        return next((line[key] for key in keys if key in line), default)

    prompt, output, arrival = find(PROMPT_KEYS), find(OUTPUT_KEYS, 1), find(ARRIVAL_KEYS)
    for name, value in (("prompt_tokens", prompt), ("output_tokens", output)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} = {value!r}")
    return prompt, output, None if arrival is None else float(arrival)


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
