"""`bench serve`: a load against a server that runs elsewhere, from client processes of its own.

The clients connect and warm up first; then all begin at one moment.  A server that dies or falls silent ends the run
with a report of what was seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from jserve.bench import lag, report
from jserve.bench.arrivals import Ramp, arrival_times
from jserve.bench.client_process import DONE, LENGTH, OUTCOME, READY, Job, framed
from jserve.bench.driver import STALL_TIMEOUT_S, Conversation, Outcome
from jserve.bench.load import Load
from jserve.bench.report import RequestRecord
from jserve.bench.target import ServerFacts, Target, ask, counters
from jserve.bench.throughput import step_figures

HEAD_START_S = 0.2
"""From the last client's being ready to the begin of the run: the word has reached all of them by then."""
STREAMS_PER_PROCESS = 64
"""Streams that one client process hears in time, beside a server on the same machine."""


class ClientFailed(RuntimeError):
    """A client process ended without a word; what it said is on stderr."""


@dataclass(frozen=True)
class Pace:
    """When requests are sent."""

    request_rate: float = math.inf
    burstiness: float = 1.0
    ramp: Ramp | None = None
    max_concurrency: int | None = None

    def timed(self, conversations: Sequence[Conversation], seed: int) -> list[Conversation]:
        """With times where there is a rate; those of a trace stay."""
        if self.ramp is None and math.isinf(self.request_rate):
            return list(conversations)
        times = arrival_times(len(conversations), self.request_rate, self.burstiness, f"arrivals {seed}", self.ramp)
        return [
            one if one.start_s is not None else replace(one, start_s=float(at))
            for one, at in zip(conversations, times)
        ]

    def about(self) -> dict[str, object]:
        ramp = {} if self.ramp is None else {
            "ramp_up_strategy": self.ramp.strategy, "ramp_up_start_rps": self.ramp.start,
            "ramp_up_end_rps": self.ramp.end,
        }
        rate = "inf" if math.isinf(self.request_rate) else self.request_rate
        return {"request_rate": rate, "burstiness": self.burstiness, "max_concurrency": self.max_concurrency, **ramp}


@dataclass(frozen=True)
class Options:
    num_warmups: int = 1
    num_processes: int | None = None
    """Client processes; unless given as many as the streams need."""
    stall_timeout_s: float = STALL_TIMEOUT_S
    percentiles: Sequence[float] = (99,)
    goodput: Mapping[str, float] | None = None


async def run(
    target: Target,
    load: Load,
    pace: Pace,
    options: Options = Options(),
    *,
    facts: ServerFacts | None = None,
    on_done: Callable[[str | None], None] = lambda error: None,
) -> tuple[dict[str, object], list[RequestRecord]]:
    """The report of one run, and the records it is made of.

    Raises:
      RequestError: nobody answers at the address.
      ConfigError: the load does not fit the model.
    """
    facts = facts or await ask(target)
    target = replace(target, model=facts.model_id)
    load = load.checked(facts.context_length)
    conversations = pace.timed(load.conversations(facts.token_ids), load.about()["seed"])
    jobs = _jobs(target, conversations, load.warm_ups(options.num_warmups, facts.token_ids), pace, options)
    before = None

    async def on_ready() -> None:
        nonlocal before
        before = await counters(target)

    outcomes = await _in_processes(jobs, on_ready, on_done)
    after = await counters(target)
    records = sorted((record for outcome in outcomes for record in outcome.records), key=lambda one: one.start)
    figures = report.header("serve", model_id=facts.model_id, tokenizer_id=facts.model_id, **facts.about)
    figures |= {"backend": target.backend, "endpoint": target.address, **load.about(), **pace.about()}
    figures |= {"num_warmups": options.num_warmups, **report.summarize(records, options.percentiles, options.goodput)}
    figures |= step_figures(before, after) if before and after else {}
    stopped = next((outcome.stopped for outcome in outcomes if outcome.stopped), None)
    if stopped:
        figures |= {"stopped": stopped, "not_sent": sum(outcome.not_sent for outcome in outcomes)}
    figures["client"] = lag.figures([outcome.lag for outcome in outcomes])
    return figures, records


def _jobs(
    target: Target, conversations: list[Conversation], warm_ups: list, pace: Pace, options: Options
) -> list[Job]:
    """The load dealt out in turn, the streams too; the first client warms up for all."""
    streams = min(pace.max_concurrency or len(conversations), len(conversations))
    count = options.num_processes or min(-(-streams // STREAMS_PER_PROCESS), max(1, (os.cpu_count() or 1) // 2))
    count = max(1, min(count, streams))
    jobs = []
    for number in range(count):
        concurrency = None
        if pace.max_concurrency is not None:
            concurrency = pace.max_concurrency // count + (number < pace.max_concurrency % count)
        warm = warm_ups if number == 0 else []
        jobs.append(Job(target, conversations[number::count], concurrency, warm, options.stall_timeout_s))
    return jobs


async def _in_processes(jobs: list[Job], on_ready, on_done) -> list[Outcome]:
    processes = [await _start() for _ in jobs]
    try:
        for process, job in zip(processes, jobs):
            process.stdin.write(framed(job))
        await asyncio.gather(*(_expect(process, READY) for process in processes))
        await on_ready()
        begin = time.perf_counter() + HEAD_START_S
        for process in processes:
            process.stdin.write(framed(begin))
        return await asyncio.gather(*(_outcome(process, on_done) for process in processes))
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await asyncio.gather(*(process.wait() for process in processes))


async def _start() -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "jserve.bench.client_process")
    return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)


async def _expect(process: asyncio.subprocess.Process, *kinds: str) -> tuple[str, object]:
    """The next message, which is of one of these kinds."""
    try:
        size = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))[0]
        found, value = pickle.loads(await process.stdout.readexactly(size))
    except asyncio.IncompleteReadError:
        raise ClientFailed(f"a client process ended with status {await process.wait()}") from None
    assert found in kinds, (found, kinds)
    return found, value


async def _outcome(process: asyncio.subprocess.Process, on_done) -> Outcome:
    while True:
        kind, value = await _expect(process, DONE, OUTCOME)
        if kind == OUTCOME:
            return value
        on_done(value)
