"""The engine loop: schedule, launch, collect, apply, in a thread of its own.

With overlap the host plans and launches step N + 1 while step N runs and reads results one step late; without it, it
waits for each step.  The tokens are the same.  Other threads talk to it through `submit`, `abort` and `call` only.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from jserve.clock import stamp
from jserve.engine.outputs import StepResult, apply, fail, outgrown
from jserve.engine.step_log import StepLog
from jserve.metrics import Histograms, StepTotals
from jserve.request import Code, FinishReason, RequestError
from jserve.scheduler import Scheduler, Sequence, SequenceState, StepPlan
from jserve.scheduler.plan import StepOutput

log = logging.getLogger(__name__)

TIER_POLL_S = 0.002
"""How often the loop looks whether a copy from a lower tier is done, where it has nothing else to do."""


class Runner(Protocol):
    """The seam to the device."""

    def launch(self, plan: StepPlan) -> dict[int, list[int]] | None:
        """Starts a step; returns before it is done.  What it says is StepOutput.forced, ahead of the output."""

    def collect(self) -> StepOutput:
        """Waits for the oldest launched step."""

    def reset(self) -> None:
        """Forgets launched steps and clears device state after a failed one."""


class EngineLoop:
    """Runs steps while there is work.  All scheduler state is touched by this thread only."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        on_result: Callable[[StepResult], None],
        *,
        overlap: bool,
        histograms: Histograms | None = None,
        on_start: Callable[[], None] | None = None,
        on_stop: Callable[[], None] | None = None,
        step_log: StepLog | None = None,
        close_tiers: Callable[[], None] | None = None,
    ):
        """`on_result` gets each step's result, on the engine thread, which also calls `on_start`, `close_tiers` and
        `on_stop`, and writes `step_log`."""
        self._scheduler = scheduler
        self._runner = runner
        self._on_result = on_result
        self._on_start = on_start
        self._on_stop = on_stop
        self._close_tiers = close_tiers
        self.on_step: Callable[[Scheduler], None] | None = None
        """A test's look at the state after each step."""
        self._depth = 1 if overlap else 0
        self._in_flight: deque[StepPlan] = deque()
        self._live: dict[str, list[Sequence]] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._coming: set[Sequence] = set()
        self._leaving: set[Sequence] = set()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="jserve-engine", daemon=True)
        self._histograms = histograms
        self._log = step_log
        self.totals = StepTotals()

    # -- called by other threads

    def start(self) -> None:
        self._thread.start()

    def submit(self, sequences: list[Sequence]) -> None:
        """Queues the sequences of one request."""
        self._coming.update(sequences)
        self._post(lambda: self._add(sequences))

    def abort(self, request_id: str) -> None:
        """Ends a request wherever it is; unknown and ended ones are a no-op."""
        self._post(lambda: self._abort(request_id))

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends one sequence, for a reason that its client has been told already."""

        def end() -> None:
            self._end(sequence, reason)
            self._leaving.discard(sequence)
            self._forget(sequence)

        self._leaving.add(sequence)
        self._post(end)

    def call(self, function: Callable[[], Any]) -> Future:
        """Runs `function` on the engine thread between two steps, with none in flight."""
        future: Future = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # its caller has left: a cancelled RPC must not be answered, nor end this thread
            self._settle()
            blocks = self._scheduler.blocks
            num_cached = blocks.num_cached_blocks + blocks.tier_stats.num_host_cached_blocks
            try:
                future.set_result(function())
            except Exception as error:  # the caller's, not ours
                future.set_exception(error)
            if self._log is not None and blocks.num_cached_blocks + blocks.tier_stats.num_host_cached_blocks < num_cached:
                self._log.flushed()

        self._post(run)
        return future

    def stop(self, timeout_s: float = 30.0) -> None:
        """Aborts what is left and ends the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def counts(self) -> tuple[int, int]:
        """Sequences that run and that wait, as clients know it: who was submitted a moment ago waits, and who was told its
        end is gone, though this thread has read of neither yet."""
        leaving = [one.state for one in tuple(self._leaving)]
        running = self._scheduler.num_running - leaving.count(SequenceState.RUNNING)
        waiting = self._scheduler.num_waiting - leaving.count(SequenceState.WAITING) + len(self._coming)
        return max(0, running), max(0, waiting)

    # -- the thread

    def _run(self) -> None:
        if self._on_start is not None:
            self._on_start()
        try:
            self._serve()
        finally:
            if self._close_tiers is not None:
                self._close_tiers()
            if self._on_stop is not None:
                self._on_stop()
            if self._log is not None:
                self._log.close()

    def _serve(self) -> None:
        while True:
            with self._wake:
                while not (self._inbox or self._scheduler.has_work or self._in_flight or self._stopping):
                    self._wake.wait()
                if self._stopping:
                    break
            self._read_inbox()
            try:
                self.step()
            except Exception:
                log.exception("a step failed; its requests end with INTERNAL")
                self._recover()
        self._read_inbox()
        self._settle()
        for request_id in list(self._live):
            self._abort(request_id)

    def step(self) -> None:
        """Schedule and launch one step, then apply the step that is due."""
        began = time.perf_counter()
        plan = self._scheduler.schedule()
        self._report(outgrown(self._scheduler.take_outgrown()))
        if self._log is not None:
            self._log.planned(plan)
        if plan is not None:
            self._in_flight.append(plan)
            if forced := self._runner.launch(plan):
                self._scheduler.jump(plan, forced)
                if self._log is not None:
                    self._log.jumped(plan, forced)
        planned = time.perf_counter()
        if self._in_flight and (plan is None or len(self._in_flight) > self._depth):
            output = self._runner.collect()
            collected = time.perf_counter()
            plan = self._in_flight.popleft()
            num_forced = self._apply(plan, output)
            self._record(plan, output, num_forced, planned - began + time.perf_counter() - collected)
        elif plan is None and self._scheduler.awaits_tier:
            with self._wake:
                self._wake.wait_for(lambda: self._inbox or self._stopping, TIER_POLL_S)
        elif plan is None and self._scheduler.has_work:
            raise RuntimeError("nothing can run although work is waiting: a bug of the scheduler")
        if self.on_step is not None:
            self.on_step(self._scheduler)

    def _apply(self, plan: StepPlan, output: StepOutput) -> int:
        """Returns how many tokens came without sampling."""
        result = apply(self._scheduler, plan, output)
        if self._log is not None:
            self._log.applied(plan, result)
        self._report(result)
        return sum(map(len, result.forced.values()))

    def _record(self, plan: StepPlan, output: StepOutput, num_forced: int, host_seconds: float) -> None:
        totals = self.totals
        totals.num_steps += 1
        totals.host_seconds += host_seconds
        totals.device_seconds += output.device_seconds
        totals.scheduled_tokens += plan.num_tokens
        totals.padded_tokens += plan.bucket - plan.num_tokens
        totals.generated_tokens += len(output.token_ids) + num_forced
        if self._histograms is not None:
            self._histograms.iteration_tokens.observe(plan.num_tokens)
            self._histograms.step_host.observe(host_seconds)
            self._histograms.step_device.observe(output.device_seconds)

    def _settle(self) -> None:
        """Applies every step in flight."""
        try:
            while self._in_flight:
                output = self._runner.collect()
                self._apply(self._in_flight.popleft(), output)
        except Exception:
            log.exception("a step failed; its requests end with INTERNAL")
            self._recover()

    def _recover(self) -> None:
        """A step broke: what it held is gone, so its sequences and all running ones end; the queue lives on."""
        broken = [s for plan in self._in_flight for s in plan.sequences] + self._scheduler.running()
        broken = broken or self._scheduler.waiting()[:1]  # nothing ran: the head of the queue is what broke
        self._in_flight.clear()
        error = RequestError(Code.INTERNAL, "the step that served this request failed; the server's log says why")
        result = fail(self._scheduler, list(dict.fromkeys(broken)), error)
        self._scheduler.forget_device()
        if self._log is not None:
            for sequence, _ in result.failed:
                self._log.ended(sequence, FinishReason.ABORTED)
            self._log.broke()
        self._report(result)
        self._runner.reset()

    def _add(self, sequences: list[Sequence]) -> None:
        self._live[sequences[0].request_id] = list(sequences)
        for sequence in sequences:
            self._scheduler.add(sequence, None if sequence is sequences[0] else sequences[0])
            self._coming.discard(sequence)
            if self._log is not None:
                self._log.arrived(sequence)

    def _abort(self, request_id: str) -> None:
        result = StepResult(stamp())
        for sequence in self._live.get(request_id, ()):
            if not sequence.finished:
                self._end(sequence, FinishReason.ABORTED)
                result.ended.append((sequence, FinishReason.ABORTED))
        self._report(result)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence between two steps."""
        if self._log is not None and not sequence.finished:
            self._log.ended(sequence, reason)
        self._scheduler.finish(sequence, reason)

    def _report(self, result: StepResult) -> None:
        for sequence, _ in (*result.ended, *result.failed):
            self._forget(sequence)
        if result.sequences or result.ended or result.failed or result.prompt_scores or result.pooled:
            self._on_result(result)

    def _forget(self, sequence: Sequence) -> None:
        siblings = self._live.get(sequence.request_id)
        if siblings is not None and all(s.finished for s in siblings):
            del self._live[sequence.request_id]

    def _post(self, message: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(message)
            self._wake.notify()

    def _read_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()
