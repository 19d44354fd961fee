"""`jserve batch`: a file of requests, one proto-JSON GenerateRequest a line, to a file of results in the same order.

Reads and writes as it goes: memory holds the requests in flight and the results that wait for an earlier one.
A line that cannot be served becomes a result with an error.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from jserve.cli.command import Command
from jserve.cli.flags import add_config_flags, config_from
from jserve.cli.progress import StartReport
from jserve.cli.request_json import json_fields, request_from_fields, request_id_of
from jserve.cli.result_json import error_to_json, result_to_json
from jserve.config import BadUsage, Config, ConfigError
from jserve.local_engine import most_in_flight, start_engine
from jserve.request import Code, RequestError
from jserve.results import collect

RESULTS_HELD_PER_RUNNING = 8
"""Results that may wait for an earlier one, per request in flight; beyond it reading stops."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-i", "--input", required=True, metavar="FILE", help="JSON lines; - is stdin")
    parser.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="JSON lines, written whole at the end; - is stdout"
    )
    parser.add_argument(
        "--max-in-flight", type=int, metavar="N", help="requests handed to the engine at once [2 x max_num_seqs]"
    )
    add_config_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.max_in_flight is not None and arguments.max_in_flight < 1:
        print("jserve batch: --max-in-flight: expected an integer of at least 1", file=sys.stderr)
        return 2
    config = config_from(arguments)
    with _opened(arguments.input) as source, _written_whole(arguments.output, arguments.input) as write:
        return asyncio.run(_batch(config, source, write, arguments.max_in_flight))


@dataclass
class Tally:
    """What has been written so far."""

    results: int = 0
    errors: int = 0
    output_tokens: int = 0


async def _batch(config: Config, source: BinaryIO, write: Callable[[str], None], max_in_flight: int | None) -> int:
    report = StartReport()
    engine = await start_engine(config, report)
    limit = most_in_flight(engine, config.scheduler.max_waiting)
    tally, began = Tally(), time.perf_counter()
    try:
        with _bar(_size(source)) as show:
            async for result in answers(engine, _lines(source, show), min(limit, max_in_flight or limit)):
                write(json.dumps(result, ensure_ascii=False))
                tally.results += 1
                tally.errors += "error" in result
                tally.output_tokens += sum(len(output["token_ids"]) for output in result.get("outputs", ()))
                show(tally)
        stopped = engine.state == "stopped"
    finally:
        report.close()
        await engine.close()
    seconds = time.perf_counter() - began
    print(
        f"{tally.results} results, {tally.errors} of them errors; {tally.output_tokens} tokens in {seconds:.1f} s "
        f"({tally.output_tokens / max(seconds, 1e-9):.1f} tokens/s)",
        file=sys.stderr,
    )
    return 1 if stopped else 0


async def answers(engine, lines: AsyncIterator[tuple[int, bytes]], limit: int) -> AsyncIterator[dict[str, object]]:
    """One result a line, in the order of `lines`, `limit` requests at a time."""
    free = asyncio.Semaphore(limit)
    tasks: deque[asyncio.Task] = deque()
    try:
        async for number, line in lines:
            await free.acquire()
            task = asyncio.ensure_future(_answer(engine, number, line))
            task.add_done_callback(lambda _: free.release())
            tasks.append(task)
            while tasks and (tasks[0].done() or len(tasks) >= RESULTS_HELD_PER_RUNNING * limit):
                yield await tasks.popleft()
        while tasks:
            yield await tasks.popleft()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(engine, number: int, line: bytes) -> dict[str, object]:
    """The result of one line; whatever goes wrong with it is in the result."""
    request_id = None
    try:
        fields = json_fields(line)
        request_id = request_id_of(fields)
        request = request_from_fields(fields)
        result = await collect(request, engine.generate(request))
        result.request_id = request_id or result.request_id
        return result_to_json(result)
    except RequestError as error:
        return _error(error, request_id, number)
    except Exception as error:  # a bug of ours must not cost the other lines
        return _error(RequestError(Code.INTERNAL, f"{type(error).__name__}: {error}"), request_id, number)


def _error(error: RequestError, request_id: str | None, number: int) -> dict[str, object]:
    """A line without a request_id is found by its number."""
    if request_id is None:
        error = RequestError(error.code, f"line {number}: {error.message}", field=error.field)
    return error_to_json(error, request_id)


async def _lines(source: BinaryIO, show: Callable) -> AsyncIterator[tuple[int, bytes]]:
    """(line number, line) of every line that is not blank.  Reads in a thread: stdin may be slow."""
    number = 0
    while line := await asyncio.to_thread(source.readline):
        number += 1
        show.advance(len(line))
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            yield number, line


@contextlib.contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    if path == "-":
        yield sys.stdin.buffer
        return
    try:
        file = open(path, "rb")
    except OSError as error:
        raise ConfigError(f"--input {path}: {error.strerror}") from None
    with file:
        yield file


@contextlib.contextmanager
def _written_whole(path: str, source: str) -> Iterator[Callable[[str], None]]:
    """Writes lines to PATH.part and renames it at the end, so that PATH is never half a run."""
    if path == "-":
        yield lambda line: print(line, flush=True)
        return
    if source != "-" and Path(path).exists() and os.path.samefile(path, source):
        raise BadUsage(f"--output {path}: is the input file")
    part = Path(f"{path}.part")
    try:
        file = open(part, "w", encoding="utf-8", errors="surrogatepass")
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot write {part}: {error.strerror}") from None
    try:
        with file:
            yield lambda line: print(line, file=file)
    except BaseException:
        if part.stat().st_size:
            print(f"not finished; the results so far are in {part}", file=sys.stderr)
        else:
            part.unlink()
        raise
    os.replace(part, path)


def _size(source: BinaryIO) -> int | None:
    """Bytes of a plain file; None for a pipe."""
    try:
        return os.fstat(source.fileno()).st_size or None
    except OSError:
        return None


class _Bar:
    """Called with the tally after each result; `advance` with the bytes of each line read."""

    def __init__(self, progress, task):
        self._progress, self._task = progress, task

    def advance(self, num_bytes: int) -> None:
        self._progress.update(self._task, advance=num_bytes)

    def __call__(self, tally: Tally) -> None:
        errors = f", {tally.errors} errors" if tally.errors else ""
        self._progress.update(self._task, description=f"{tally.results} results{errors}, {tally.output_tokens} tokens")


@contextlib.contextmanager
def _bar(num_bytes: int | None) -> Iterator[_Bar]:
    """A bar over the bytes of the input on stderr; nothing where that is no terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield _Bar(progress, progress.add_task("0 results", total=num_bytes))


COMMAND = Command(
    usage="-i requests.jsonl -o results.jsonl [--model MODEL] [flags]",
    summary="Answers a file of requests in this process, one result a line, in input order.",
    add_arguments=add_arguments,
    run=run,
    epilog="""\
A request, one a line (the fields are those of the gRPC GenerateRequest):
  {"request_id": "a", "prompt": "Once upon a time", "sampling_params": {"max_tokens": 20, "temperature": 0}}
  {"messages": [{"role": "user", "content": "Hi"}], "sampling_params": {"n": 2, "seed": 7}}

A result, one a line:
  {"request_id", "outputs": [{"index", "text", "token_ids", "finish_reason", ...}], "usage": {...}, "metrics": {...}}
  {"request_id", "error": {"code", "field", "message"}}
A blank line is no request and has no result; it counts in the line numbers that errors name.
Errors are results: the other lines go on and the exit code is 0.""",
)
