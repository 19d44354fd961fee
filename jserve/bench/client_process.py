"""`python -m jserve.bench.client_process`: one client of `jserve bench serve`, in a process of its own.

Reads a Job from stdin, warms up, says that it is ready, waits for the time to begin, sends its share of the load, and
writes what it saw.  Messages are pickles behind their length; both ends are this program.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

from jserve.bench.driver import STALL_TIMEOUT_S, Conversation, Outcome, drive, run_closed
from jserve.bench.target import Target, stream_of
from jserve.request import GenerateRequest

READY, DONE, OUTCOME = "ready", "done", "outcome"
LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Job:
    target: Target
    conversations: Sequence[Conversation]
    concurrency: int | None
    warm_ups: Sequence[GenerateRequest] = ()
    stall_timeout_s: float = STALL_TIMEOUT_S


def framed(message: object) -> bytes:
    data = pickle.dumps(message)
    return LENGTH.pack(len(data)) + data


def read_framed(stream: BinaryIO) -> object:
    """EOFError at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    return pickle.loads(stream.read(LENGTH.unpack(head)[0]))


async def work(job: Job, wait_for_begin, on_done) -> Outcome:
    """`wait_for_begin()` gives the `time.perf_counter()` at which the run begins; one clock for all processes."""
    async with stream_of(job.target) as stream:
        if job.warm_ups:
            concurrency = min(len(job.warm_ups), job.concurrency or len(job.warm_ups))
            await run_closed(stream, job.warm_ups, concurrency, stall_timeout_s=job.stall_timeout_s)
        begin = await wait_for_begin()
        await asyncio.sleep(max(0.0, begin - time.perf_counter()))
        return await drive(
            stream, job.conversations, concurrency=job.concurrency, begin=begin, on_done=on_done,
            stall_timeout_s=job.stall_timeout_s,
        )


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process, by closing its stdin
    job: Job = read_framed(sys.stdin.buffer)
    out = sys.stdout.buffer

    def say(kind: str, value: object = None) -> None:
        try:
            out.write(framed((kind, value)))
            out.flush()
        except BrokenPipeError:  # the parent has gone: nobody wants this load any more
            os._exit(1)

    async def wait_for_begin() -> float:
        say(READY)
        return await asyncio.to_thread(read_framed, sys.stdin.buffer)

    try:
        say(OUTCOME, asyncio.run(work(job, wait_for_begin, lambda record: say(DONE, record.error))))
    except EOFError:
        os._exit(1)


if __name__ == "__main__":
    main()
