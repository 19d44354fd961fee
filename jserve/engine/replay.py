"""Makes the decisions of a step log again, with no model, and says where the first one differs."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jserve.config import ConfigError
from jserve.engine.outputs import apply
from jserve.engine.step_log import VERSION, KvSettings, PlanEncoder
from jserve.request import FinishReason, Sampling
from jserve.sampling.beam_search import Candidates, Move
from jserve.scheduler import PolicySettings, PreemptionSettings, Scheduler, SchedulerLimits, Sequence, StepPlan
from jserve.scheduler.plan import StepOutput

STOP_TOKEN = -2
"""Stands for whatever token ended a sequence."""


@dataclass(frozen=True)
class Difference:
    """The first decision that came out otherwise."""

    line: int
    step: int
    recorded: dict[str, Any] | None
    replayed: dict[str, Any] | None

    @property
    def keys(self) -> list[str]:
        """What differs between the two records."""
        recorded, replayed = self.recorded or {}, self.replayed or {}
        return [key for key in {**recorded, **replayed} if recorded.get(key) != replayed.get(key)]


@dataclass(frozen=True)
class Replay:
    num_steps: int
    num_requests: int
    num_tokens: int
    """Scheduled in all steps."""
    num_preemptions: int
    difference: Difference | None


def replay(path: str | Path) -> Replay:
    """Runs the log's events through a new scheduler.  ConfigError where the file is no step log or is damaged."""
    lines = _lines(path)
    _, header = next(lines, (0, {}))
    if header.get("jserve_step_log") != VERSION:
        raise ConfigError(f"{path}: not a step log of version {VERSION}: it starts with {str(header)[:60]}")
    return _Replayer(header, path).run(lines)


class _Replayer:
    def __init__(self, header: dict[str, Any], path: str | Path):
        try:
            limits, kv = SchedulerLimits(**_tuples(header["limits"])), KvSettings(**_tuples(header["kv"]))
            self._kv = kv
            policy, preemption = PolicySettings(**header["policy"]), PreemptionSettings(**header.get("preemption", {}))
            self._scheduler = Scheduler(limits, kv.make(), lambda: 0.0, policy, preemption)
        except (TypeError, KeyError) as error:
            raise ConfigError(f"{path}: the log is of another version: {error}") from None
        self._path = path
        self._encoder = PlanEncoder()
        self._sequences: dict[int, Sequence] = {}
        self._in_flight: deque[StepPlan] = deque()
        self._forced: dict[int, dict[int, list[int]]] = {}  # by step
        self._num_steps = self._num_tokens = 0

    def run(self, lines: Iterator[tuple[int, dict[str, Any]]]) -> Replay:
        difference, number = None, 1
        try:
            for number, record in lines:
                if "a" in record:
                    self._arrive(record)
                elif "e" in record:
                    self._scheduler.finish(self._sequences[record["e"]], FinishReason(record["reason"]))
                elif "j" in record:
                    self._jump(record["j"])
                elif "r" in record:
                    self._apply(record)
                elif "f" in record:
                    self._scheduler.blocks.flush()
                elif "x" in record:
                    self._in_flight.clear()
                    self._scheduler.forget_device()
                elif (difference := self._plan(number, record["p"])) is not None:
                    break
        except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
            raise ConfigError(f"{self._path}:{number}: damaged: {error!r}") from None
        return Replay(
            self._num_steps, len(self._sequences), self._num_tokens, self._scheduler.num_preemptions, difference
        )

    def _arrive(self, record: dict[str, Any]) -> None:
        tokens = np.zeros(record["prompt"], np.int32)
        blocks = np.frombuffer(base64.b64decode(record["blocks"]), np.int32)
        tokens[self._kv.block_size - 1 :: self._kv.block_size] = blocks
        sequence = Sequence(
            str(record["a"]), tokens, _sampling(record["max"], record.get("beams", 1)), priority=record.get("priority", 0),
            arrival=record["at"], salt=bytes.fromhex(record.get("salt", "")),
            use_prefix_cache=not record.get("no_cache", False), tenant=record.get("tenant", ""),
            search=RecordedSearch() if "beams" in record else None,
        )
        sequence.stop_ids = frozenset([STOP_TOKEN])
        self._scheduler.add(sequence, self._sequences[record["of"]] if "of" in record else None)
        if sequence.order != record["a"]:
            raise ValueError(f"arrival {record['a']} where {sequence.order} was expected")
        self._sequences[sequence.order] = sequence

    def _plan(self, line: int, recorded: dict[str, Any] | None) -> Difference | None:
        plan = self._scheduler.schedule()
        self._scheduler.take_outgrown()
        replayed = self._encoder.encode(plan, self._scheduler)
        if replayed != recorded:
            return Difference(line, (recorded or replayed)["step"], recorded, replayed)
        if plan is not None:
            self._in_flight.append(plan)
            self._num_steps += 1
            self._num_tokens += plan.num_tokens
        return None

    def _jump(self, jumps: list[list[int]]) -> None:
        plan = self._in_flight[-1]
        forced = {place: [0] * (count - ends) + [STOP_TOKEN] * ends for place, count, ends in jumps}
        self._scheduler.jump(plan, forced)
        self._forced[plan.step_id] = forced

    def _apply(self, record: dict[str, Any]) -> None:
        plan = self._in_flight.popleft()
        if plan.step_id != record["r"]:
            raise ValueError(f"result of step {record['r']} for step {plan.step_id}")
        tokens = {order: value for order, value in record.get("blocks", ())}
        tokens |= dict.fromkeys(record.get("stop", ()), STOP_TOKEN)
        orders = [plan.sequences[row].order for row in plan.sampling_rows]
        forced = self._forced.pop(plan.step_id, {})
        inner = {(order, offset): value for order, offset, value in record.get("inner", ())}
        for place, token_ids in forced.items():
            order, count = orders[place], len(token_ids)
            token_ids[:] = [inner.get((order, at + 1 - count), 0) for at in range(count - 1)] + [tokens.get(order, 0)]
            tokens[order] = token_ids[0]
        failed = set(record.get("failed", ()))
        for order, moves in record.get("beams", ()):
            self._sequences[order].search.coming = [Move(parent, token_id) for parent, token_id in moves]
        beams = [plan.sequences[row].group for row in plan.sampling_rows[plan.beams]]
        broken = [not failed.isdisjoint(one.order for one in group.members) for group in beams]
        output = StepOutput(
            plan.step_id,
            np.array([tokens.get(order, 0) for order in orders], np.int32),
            is_sound=np.array([order not in failed for order in orders], bool),
            device_seconds=record["s"],
            forced=forced,
            beam_ids=np.zeros((len(beams), 1), np.int32),
            beam_logprobs=np.where(broken, np.nan, 0.0).astype(np.float32)[:, None],
        )
        apply(self._scheduler, plan, output)


class RecordedSearch:
    """A beam search that chooses what the log says."""

    def __init__(self) -> None:
        self.coming: list[Move] = []
        self._num_beams = 1
        self._reported: set[int] = set()

    def has_report(self, beam: int) -> bool:
        return beam in self._reported

    def report(self, beam: int, candidates: Candidates) -> None:
        self._reported.add(beam)

    def forget_reports(self) -> None:
        self._reported.clear()

    @property
    def is_due(self) -> bool:
        return len(self._reported) == self._num_beams

    def advance(self) -> list[Move]:
        self._reported.clear()
        self._num_beams = len(self.coming)
        return self.coming

    def cut(self) -> None:
        pass


def describe(difference: Difference) -> str:
    """The two decisions, for a person."""
    names = {
        "join": "rows of one token that joined", "leave": "rows of one token that left",
        "chunks": "chunks [sequence, position, tokens]", "admit": "admitted [sequence, cached tokens]",
        "bucket": "bucket", "free": "blocks left", "preempted": "preemptions so far", "swap": "blocks moved to and from host memory",
        "sum": "checksum of all rows", "step": "step",
    }
    lines = [f"step {difference.step} (line {difference.line}) differs:"]
    for key in difference.keys:
        values = [(record or {}).get(key, "none") for record in (difference.recorded, difference.replayed)]
        lines.append(f"  {names.get(key, key)}: recorded {values[0]}, now {values[1]}")
    return "\n".join(lines)


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _lines(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                if not line.endswith("\n"):
                    return  # the writer was cut short in its last line
                raise ConfigError(f"{path}:{number}: not a line of a step log: {line[:60]!r}") from None
            yield number, record if isinstance(record, dict) else {}


def _sampling(max_tokens: int, beam_width: int) -> Sampling:
    names = {field.name for field in dataclasses.fields(Sampling)}
    values = dict(
        temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, max_tokens=max_tokens, min_tokens=0, stop=(),
        stop_token_ids=frozenset(), eos_token_ids=frozenset(), banned_below_min_tokens=(),
        include_stop_str_in_output=False, skip_special_tokens=True, logprobs=None, prompt_logprobs=None,
        beam_width=beam_width,
    )
    return Sampling(**{name: value for name, value in values.items() if name in names})
