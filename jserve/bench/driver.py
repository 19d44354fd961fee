"""Sends requests when they are due and notes when their tokens come.

A load is a list of conversations: requests of one user, one after the other.  Open loop: each begins at its own time,
whatever the server does; closed loop: so many are open at once.  Both end, with a record for every request that was
sent, also where the server dies or falls silent.  Works with anything that streams pieces: the engine in this process,
gRPC, HTTP.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from jserve.bench.lag import Lag, LagMeter
from jserve.bench.report import RequestRecord
from jserve.request import Code, GenerateRequest, RequestError, RequestMetrics, Usage

GONE_AFTER = 10
"""Requests in a row that find no server, with no token in between: it is gone, and the rest is not sent."""
STALL_TIMEOUT_S = 120.0
"""Seconds without a word on any open stream after which all of them are given up."""
NO_SERVER = Code.UNAVAILABLE.value
STALLED = "stalled"


@dataclass(frozen=True)
class Piece:
    """What one message of a stream says."""

    num_tokens: int | None
    """None: text came, of a number of tokens that only the usage at the end tells."""
    token_ids: Sequence[int] = ()
    num_characters: int = 0
    finished: bool = False
    usage: Usage | None = None
    metrics: RequestMetrics | None = None


Stream = Callable[[GenerateRequest], AsyncIterator[Piece]]


@dataclass(frozen=True)
class Conversation:
    """The prompt of the first turn is whole; that of a later one is appended to all tokens before it."""

    turns: tuple[GenerateRequest, ...]
    start_s: float | None = None
    """Seconds after the run's begin.  None: as soon as there is room."""


@dataclass
class Outcome:
    """What a client saw of a run."""

    records: list[RequestRecord] = field(default_factory=list)
    not_sent: int = 0
    stopped: str | None = None
    """Why the run ended early."""
    lag: Lag = Lag()


def engine_stream(engine) -> Stream:
    """Pieces of anything that has `generate(request)`: an engine in this process, or `server.AsyncClient`."""

    async def stream(request: GenerateRequest) -> AsyncIterator[Piece]:
        async for update in engine.generate(request):
            token_ids = [token_id for output in update.outputs for token_id in output.token_ids]
            finished = any(output.finish_reason is not None for output in update.outputs)
            yield Piece(len(token_ids), token_ids, finished=finished, usage=update.usage, metrics=update.metrics)

    return stream


async def drive(
    stream: Stream,
    conversations: Iterable[Conversation],
    *,
    concurrency: int | None = None,
    begin: float | None = None,
    stall_timeout_s: float = STALL_TIMEOUT_S,
    on_done: Callable[[RequestRecord], None] = lambda record: None,
) -> Outcome:
    """Sends all conversations in order, at most `concurrency` open at once; records in the order of the requests.

    Args:
      begin: `time.perf_counter()` from which `start_s` counts; now unless given.
    """
    return await _Run(stream, concurrency, begin, stall_timeout_s, on_done).all(list(conversations))


async def run_closed(
    stream: Stream, requests: Iterable[GenerateRequest], concurrency: int, **options
) -> list[RequestRecord]:
    """Keeps `concurrency` requests open until all have been answered."""
    outcome = await drive(stream, [Conversation((one,)) for one in requests], concurrency=concurrency, **options)
    return outcome.records


class _Run:
    def __init__(self, stream, concurrency, begin, stall_timeout_s, on_done):
        self._stream = stream
        self._room = asyncio.Semaphore(concurrency) if concurrency is not None else None
        self._begin = time.perf_counter() if begin is None else begin
        self._stall_timeout_s = stall_timeout_s
        self._on_done = on_done
        self._records: dict[tuple[int, int], RequestRecord] = {}
        self._tasks: set[asyncio.Task] = set()
        self._last_word = time.perf_counter()
        self._num_without_server = 0
        self._stopped: str | None = None
        self._stop = asyncio.Event()
        self._meter = LagMeter()

    async def all(self, conversations: list[Conversation]) -> Outcome:
        watching = [asyncio.ensure_future(self._watch()), asyncio.ensure_future(self._meter.run())]
        try:
            for number, conversation in enumerate(conversations):
                if not await self._due(conversation):
                    break
                self._open(number, conversation)
            while self._tasks:
                await asyncio.wait(set(self._tasks))
        finally:
            for task in (*watching, *self._tasks):
                task.cancel()
            await asyncio.gather(*watching, *self._tasks, return_exceptions=True)
        records = [self._records[key] for key in sorted(self._records)]
        num_turns = sum(len(conversation.turns) for conversation in conversations)
        return Outcome(records, num_turns - len(records), self._stopped, self._meter.lag())

    async def _due(self, conversation: Conversation) -> bool:
        """Waits for the conversation's time and for room; False where the run has been stopped."""
        if conversation.start_s is not None:
            left = self._begin + conversation.start_s - time.perf_counter()
            if left > 0:
                await self._unless_stopped(asyncio.sleep(left))
        if self._room is not None:
            await self._unless_stopped(self._room.acquire())
        return self._stopped is None

    async def _unless_stopped(self, wait) -> None:
        tasks = [asyncio.ensure_future(wait), asyncio.ensure_future(self._stop.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    def _open(self, number: int, conversation: Conversation) -> None:
        task = asyncio.ensure_future(self._talk(number, conversation))
        self._tasks.add(task)

        def closed(task: asyncio.Task) -> None:
            self._tasks.discard(task)
            if self._room is not None:
                self._room.release()

        task.add_done_callback(closed)

    async def _talk(self, number: int, conversation: Conversation) -> None:
        history: list[int] = []
        due = None if conversation.start_s is None else self._begin + conversation.start_s
        for turn, request in enumerate(conversation.turns):
            if self._stopped is not None:
                return
            if turn:
                request = dataclasses.replace(request, prompt_token_ids=[*history, *request.prompt_token_ids])
            record = await measure(self._stream, request, self._heard, lambda: self._stopped, due)
            self._meter.sent(record)
            self._records[number, turn] = record
            self._on_done(record)
            self._judge(record)
            if record.error is not None:
                return
            due = None
            history = [*(request.prompt_token_ids or ()), *record.token_ids]

    def _heard(self) -> None:
        self._last_word = time.perf_counter()

    def _judge(self, record: RequestRecord) -> None:
        if record.arrivals or record.error != NO_SERVER:
            self._num_without_server = 0
        else:
            self._num_without_server += 1
            if self._num_without_server >= GONE_AFTER:
                self._end(f"no server: {GONE_AFTER} requests in a row found none")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._stall_timeout_s / 4))
            if not self._tasks:
                self._heard()
            elif time.perf_counter() - self._last_word > self._stall_timeout_s:
                self._end(f"{STALLED}: no open stream said anything for {self._stall_timeout_s:g} s")
                for task in tuple(self._tasks):
                    task.cancel()

    def _end(self, why: str) -> None:
        self._stopped = self._stopped or why
        self._stop.set()


async def measure(
    stream: Stream,
    request: GenerateRequest,
    heard: Callable[[], None] = lambda: None,
    stopped: Callable[[], str | None] = lambda: None,
    due: float | None = None,
) -> RequestRecord:
    """Sends one request and notes when its tokens come.  A failure becomes part of the record.

    Args:
      heard: called with every message.
      stopped: where it says why, a cancelled request counts as a failure of the server and is recorded.
    """
    arrivals: list[tuple[float, int | None, int]] = []
    token_ids: list[int] = []
    usage, metrics, finished, error = None, None, False, None
    start = time.perf_counter()
    heard()
    try:
        async for piece in stream(request):
            heard()
            if piece.num_tokens or (piece.num_tokens is None and piece.num_characters):
                arrivals.append((time.perf_counter(), piece.num_tokens, piece.num_characters))
                token_ids += piece.token_ids
            finished |= piece.finished
            usage = piece.usage or usage
            metrics = piece.metrics or metrics
    except RequestError as refusal:
        error = refusal.code.value
    except asyncio.CancelledError:
        if (why := stopped()) is None:
            raise
        error = why.partition(":")[0]
    end = time.perf_counter()
    if error is None and not arrivals:
        error = "empty"
    elif error is None and not finished:
        error = "cut"
    return RequestRecord(
        prompt_tokens=usage.prompt_tokens if usage else len(request.prompt_token_ids or ()),
        start=start,
        arrivals=counted(arrivals, usage.completion_tokens if usage else None),
        end=end,
        cached_tokens=usage.cached_tokens if usage else 0,
        error=error,
        token_ids=tuple(token_ids),
        due=due,
        queue_s=metrics.queue_s if metrics else None,
    )


def counted(
    arrivals: Sequence[tuple[float, int | None, int]], num_tokens: int | None
) -> tuple[tuple[float, int], ...]:
    """(time, number of tokens) of each message.  Where messages do not say their number, the usage's total is dealt
    out: one to each message, what is left by length of text; one each where there is no usage."""
    silent = [at for at, (_, count, _) in enumerate(arrivals) if count is None]
    counts = [count for _, count, _ in arrivals]
    if silent:
        known = sum(count for count in counts if count is not None)
        left = len(silent) if num_tokens is None else max(0, num_tokens - known)
        for at, share in zip(silent, _dealt(left, [arrivals[at][2] for at in silent])):
            counts[at] = share
    return tuple((when, count) for (when, _, _), count in zip(arrivals, counts) if count)


def _dealt(total: int, lengths: list[int]) -> list[int]:
    """`total` over messages: one each as far as it goes, the rest in proportion to `lengths`, exactly."""
    shares = [1 if at < total else 0 for at in range(len(lengths))]
    rest = total - sum(shares)
    if rest:
        whole = sum(lengths)
        done = at_end = 0
        for at, length in enumerate(lengths):
            at_end += length
            upto = rest * at_end // whole
            shares[at] += upto - done
            done = upto
    return shares
