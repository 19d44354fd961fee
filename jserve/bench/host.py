"""Host time of a step, without a device: schedule, build the arrays, apply the results, at N running and M waiting.

The device is the stand-in, whose own time is left out; the arrays are built by the runner's own code.  Times are CPU
seconds of the thread, so that other work on the machine does not count.
"""

from __future__ import annotations

import cProfile
import io
import pstats
import time
from dataclasses import dataclass, field

import numpy as np

from jserve.bench import report
from jserve.engine.outputs import apply
from jserve.kv import BlockManager, GroupSpec
from jserve.request import Sampling
from jserve.runner.batch import InputLayout, build
from jserve.runner.compile_plan import StepShape
from jserve.runner.fake_runner import FakeRunner
from jserve.runner.sampling_rows import SamplingRows
from jserve.scheduler import PolicySettings, Scheduler, SchedulerLimits, Sequence, StepPlan
from jserve.scheduler.buckets import default_sequence_buckets, default_token_buckets

PHASES = ("schedule", "build", "apply")


@dataclass(frozen=True)
class HostLoad:
    num_running: int = 256
    num_waiting: int = 100_000
    context: int = 1000
    """Tokens of a running sequence."""
    churn: bool = True
    """One sequence ends and another enters about every step; else the same ones decode all the time."""
    num_steps: int = 200
    block_size: int = 64
    policy: str = "fcfs"
    prompt: int = 64
    """Tokens of a sequence that enters."""


@dataclass
class HostTimes:
    """Seconds of each measured step by phase."""

    load: HostLoad
    seconds: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    profile: str | None = None

    @property
    def totals(self) -> np.ndarray:
        return np.sum([self.seconds[phase] for phase in PHASES], axis=0)


def measure(load: HostLoad, *, profile: bool = False) -> HostTimes:
    """Fills the slots, then times `num_steps` steps."""
    host = _Host(load)
    host.fill()
    times = HostTimes(load)
    profiler = cProfile.Profile()
    for _ in range(20):
        host.step(HostTimes(load))
    if profile:
        profiler.enable()
    for _ in range(load.num_steps):
        host.step(times)
    if profile:
        profiler.disable()
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(25)
        times.profile = text.getvalue()
    return times


class _Host:
    def __init__(self, load: HostLoad):
        self._load = load
        slots, size = load.num_running, load.block_size
        longest = load.context + 4096
        self._budget = max(2 * slots, 512)
        self.blocks = BlockManager(
            groups=[GroupSpec()],
            num_blocks=[2 + (slots + 4) * -(-longest // size)],
            block_size=size,
            num_slots=slots,
            max_blocks_per_seq=-(-longest // size),
        )
        limits = SchedulerLimits(self._budget, slots, default_token_buckets(self._budget), default_sequence_buckets(slots))
        self.scheduler = Scheduler(limits, self.blocks, policy=PolicySettings(load.policy))
        self._runner = FakeRunner(slots)
        self._rows = SamplingRows(slots, vocab_size=1000)
        self._random = np.random.default_rng(0)
        self._sampling: dict[int, Sampling] = {}
        self._made = 0

    def fill(self) -> None:
        """All slots decode, the queue is as long as asked."""
        load = self._load
        for _ in range(load.num_running):
            lengths = (load.num_running // 2, 2 * load.num_running) if load.churn else (4000, 4001)
            self._add(load.context, 1 + int(self._random.integers(*lengths)))
        while self.scheduler.num_waiting or any(one.num_output == 0 for one in self.scheduler.running()):
            self.step(HostTimes(load))
        for _ in range(load.num_waiting):
            self._add(load.prompt, load.num_running)

    def step(self, times: HostTimes) -> None:
        began = time.thread_time()
        plan = self.scheduler.schedule()
        planned = time.thread_time()
        self._build(plan)
        built = time.thread_time()
        self._runner.launch(plan)
        output = self._runner.collect()
        output.device_seconds = 0.01
        collected = time.thread_time()
        result = apply(self.scheduler, plan, output)
        times.seconds["apply"].append(time.thread_time() - collected)
        times.seconds["schedule"].append(planned - began)
        times.seconds["build"].append(built - planned)
        for _ in result.ended:  # the queue keeps its length
            self._add(self._load.prompt, self._load.num_running)

    def _build(self, plan: StepPlan) -> None:
        for sequence in plan.admitted:
            self._rows.enter(sequence)
        slots = self._load.num_running
        shape = StepShape(plan.bucket, plan.bucket if plan.decode_only else min(plan.bucket, slots), plan.decode_only)
        layout = InputLayout(shape, slots, self.blocks.tables[0].shape[1], 1)
        build(plan, layout, self.blocks.tables)
        self._rows.build(plan, slots)

    def _add(self, num_prompt: int, max_tokens: int) -> None:
        tokens = np.full(num_prompt, 7, np.int32)
        tokens[0] = self._made  # no two prompts are equal
        self._made += 1
        if max_tokens not in self._sampling:
            self._sampling[max_tokens] = _greedy(max_tokens)
        self.scheduler.add(Sequence(str(self._made), tokens, self._sampling[max_tokens], arrival=float(self._made)))


def figures(all_times: list[HostTimes]) -> dict[str, object]:
    """The report: microseconds a step, by phase and in sum."""
    return report.header("host") | {
        "points": [
            {
                "running": times.load.num_running,
                "waiting": times.load.num_waiting,
                "churn": times.load.churn,
                "policy": times.load.policy,
                "num_steps": times.load.num_steps,
                **{f"median_{phase}_us": _us(np.median(times.seconds[phase])) for phase in PHASES},
                "median_total_us": _us(np.median(times.totals)),
                "p10_total_us": _us(np.percentile(times.totals, 10)),
                "p99_total_us": _us(np.percentile(times.totals, 99)),
            }
            for times in all_times
        ]
    }


def render(answer: dict[str, object]) -> str:
    lines = [
        f"{'running':>8} {'waiting':>8} {'load':>7} {'schedule':>9} {'build':>7} {'apply':>7} {'total':>7} {'p10':>7}"
        f" {'p99':>8}   microseconds of CPU a step, medians"
    ]
    for point in answer["points"]:
        lines.append(
            f"{point['running']:>8} {point['waiting']:>8} {'churn' if point['churn'] else 'steady':>7}"
            f" {point['median_schedule_us']:>9.0f} {point['median_build_us']:>7.0f} {point['median_apply_us']:>7.0f}"
            f" {point['median_total_us']:>7.0f} {point['p10_total_us']:>7.0f} {point['p99_total_us']:>8.0f}"
        )
    return "\n".join(lines)


def _us(seconds: float) -> float:
    return 1e6 * float(seconds)


def _greedy(max_tokens: int) -> Sampling:
    return Sampling(
        temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, max_tokens=max_tokens, min_tokens=0, stop=(),
        stop_token_ids=frozenset(), eos_token_ids=frozenset([2]), banned_below_min_tokens=(),
        include_stop_str_in_output=False, skip_special_tokens=True, logprobs=None, prompt_logprobs=None,
    )
