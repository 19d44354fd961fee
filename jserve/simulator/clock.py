"""Runs a system against simulated time: requests come, steps take as long as the model says, tokens are noted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from jserve.bench.report import RequestRecord
from jserve.simulator.steps import SimStep, StepSeconds, System
from jserve.simulator.workload import SimRequest


@dataclass(frozen=True)
class Segment:
    """A request held a row from one step to another; `kind` is prefill, decode or idle."""

    row: int
    number: int
    kind: str
    first_step: int
    last_step: int
    start: float
    end: float


@dataclass
class Run:
    """What happened."""

    system: str
    num_rows: int
    requests: dict[int, SimRequest] = field(default_factory=dict)
    token_times: dict[int, list[float]] = field(default_factory=dict)
    refused: list[int] = field(default_factory=list)
    starts: dict[int, float] = field(default_factory=dict)
    """When a request was first in a step."""
    first_steps: dict[int, int] = field(default_factory=dict)
    """The number of that step, from 1."""
    step_ends: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    step_useful: list[int] = field(default_factory=list)
    step_computed: list[int] = field(default_factory=list)
    step_rows: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        return len(self.step_ends)

    @property
    def useful_share(self) -> float:
        """Useful tokens of all computed ones."""
        return sum(self.step_useful) / max(1, sum(self.step_computed))

    def records(self) -> list[RequestRecord]:
        """As a client of the bench would have noted them."""
        records = []
        for number, request in sorted(self.requests.items()):
            times = self.token_times.get(number)
            if times:
                arrivals = tuple((time, 1) for time in times)
                records.append(RequestRecord(request.prompt, request.arrival, arrivals, times[-1]))
            else:
                error = "RESOURCE_EXHAUSTED" if number in self.refused else "empty"
                records.append(RequestRecord(request.prompt, request.arrival, (), request.arrival, error=error))
        return records

    def gaps(self, numbers: Iterable[int] | None = None, after: float = 0.0) -> np.ndarray:
        """Times between tokens, of these requests, that end later than `after`."""
        chosen = self.token_times if numbers is None else {n: self.token_times.get(n, []) for n in numbers}
        parts = [np.diff(times)[np.asarray(times[1:]) > after] for times in chosen.values() if len(times) > 1]
        return np.concatenate(parts) if parts else np.zeros(0)


def simulate(
    system: System,
    requests: Iterable[SimRequest],
    step_seconds: StepSeconds,
    *,
    concurrency: int | None = None,
    picture_steps: int = 0,
    stop: Callable[[Run], bool] = lambda run: False,
) -> Run:
    """Runs until every request has ended, or `stop(run)` says so after a step.

    Args:
      requests: ascending in arrival.
      concurrency: a closed loop: so many are open at once, arrival times do not matter.
      picture_steps: keep the timeline of so many steps.
    """
    run = Run(system.name, system.num_rows)
    clock = _Clock(run, system, step_seconds, picture_steps)
    coming = deque(requests)
    num_open = 0
    now = 0.0
    while True:
        while coming and (num_open < concurrency if concurrency else coming[0].arrival <= now):
            request = coming.popleft()
            if concurrency:
                request = SimRequest(**{**request.__dict__, "arrival": now})
            num_open += clock.add(request)
        launched = clock.launch(now)
        if clock.is_due(launched):
            now, num_ended = clock.collect(now)
            num_open -= num_ended
            if stop(run):
                break
        elif launched:
            continue  # another step may be in flight behind it
        elif coming and not concurrency:
            now = coming[0].arrival
        else:
            if system.has_work:
                raise RuntimeError(f"{system.name}: nothing can run although work is waiting")
            break
    clock.close()
    return run


class _Clock:
    """Steps in flight, the device's time, and the notes that become a Run."""

    def __init__(self, run: Run, system: System, step_seconds: StepSeconds, picture_steps: int):
        self._run, self._system, self._step_seconds = run, system, step_seconds
        self._picture_steps = picture_steps
        self._in_flight: deque[tuple[SimStep, float, float]] = deque()  # step, end, seconds
        self._device_free = 0.0
        self._open: dict[int, Segment] = {}  # by row

    def add(self, request: SimRequest) -> bool:
        self._run.requests[request.number] = request
        accepted = self._system.add(request)
        if not accepted:
            self._run.refused.append(request.number)
        return accepted

    def launch(self, now: float) -> bool:
        step = self._system.schedule(now)
        if step is None:
            return False
        begin = max(now, self._device_free)
        seconds = self._step_seconds(step)
        self._device_free = begin + seconds
        self._in_flight.append((step, self._device_free, seconds))
        run = self._run
        for number in step.numbers:
            if number not in run.starts:
                run.starts[number] = begin
                run.first_steps[number] = run.num_steps + len(self._in_flight)
        return True

    def is_due(self, launched: bool) -> bool:
        return bool(self._in_flight) and (not launched or len(self._in_flight) > self._system.depth)

    def collect(self, now: float) -> tuple[float, int]:
        step, end, seconds = self._in_flight.popleft()
        outcome = self._system.apply(step, end, seconds)
        run = self._run
        run.step_ends.append(end)
        run.step_seconds.append(seconds)
        run.step_useful.append(step.num_useful)
        run.step_computed.append(step.num_tokens)
        run.step_rows.append(len(step.numbers))
        times = run.token_times
        for number in outcome.emitted:
            if number in times:
                times[number].append(end)
            else:
                times[number] = [end]
        if run.num_steps <= self._picture_steps:
            self._draw(step, end - seconds, end)
        return max(now, end), len(outcome.ended)

    def close(self) -> None:
        self._run.segments.extend(self._open.values())
        self._open.clear()

    def _draw(self, step: SimStep, start: float, end: float) -> None:
        at = self._run.num_steps
        for row, number, granted in zip(step.rows.tolist(), step.numbers, step.granted.tolist()):
            kind = "idle" if granted == 0 else "decode" if granted == 1 else "prefill"
            known = self._open.get(row)
            if known and (known.number, known.kind, known.last_step) == (number, kind, at - 1):
                self._open[row] = Segment(row, number, kind, known.first_step, at, known.start, end)
                continue
            if known:
                self._run.segments.append(known)
            self._open[row] = Segment(row, number, kind, at, at, start, end)
