"""Servers with a script, for tests of the bench: gRPC around a scripted engine, and one that speaks OpenAI's API."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterable
from urllib.parse import urlsplit

from jserve.request import FinishReason, GenerateUpdate, OutputDelta, RequestMetrics, Usage
from tests.support.in_process import InProcessEngine

Script = Iterable[tuple[float, int] | BaseException]
"""(seconds to wait, tokens of the message); an exception is raised, and a script without usage is cut."""


class ScriptedEngine(InProcessEngine):
    """Streams what `pick(request number)` says.  Every token has the id of one space."""

    def __init__(self, pick: Callable[[int], Script], num_cached: int = 0):
        super().__init__()
        self.pick, self.num_cached = pick, num_cached
        self.num_seen = 0

    async def generate(self, request):
        number, self.num_seen = self.num_seen, self.num_seen + 1
        self.requests.append(request)
        total = 0
        for step in self.pick(number):
            if isinstance(step, BaseException):
                raise step
            delay, count = step
            await asyncio.sleep(delay)
            total += count
            self.generated_tokens += count
            if count:
                yield GenerateUpdate(request.request_id, [OutputDelta(0, " " * count, [32] * count)])
        yield GenerateUpdate(
            request.request_id,
            [OutputDelta(0, finish_reason=FinishReason.LENGTH)] if total else [],
            usage=Usage(len(request.prompt_token_ids), total, self.num_cached),
            metrics=RequestMetrics(0.0, 0.001, None, None, 0.001, 0),
        )


@contextlib.asynccontextmanager
async def openai_server(
    script: Callable[[int], Script], *, tells: str = "ids", num_cached: int = 0, refuse: int | None = None,
    answers_per_connection: int | None = None,
) -> AsyncIterator[tuple[str, list[dict]]]:
    """(URL, bodies received) of a /v1/completions.  `tells`: ids, running (usage in every message), usage (at the end),
    last (usage in the message that tells the reason) or nothing.  `refuse`: answers with this status.  After so many
    answers a connection ends as the next request arrives, as one does that its server had given up meanwhile."""
    bodies: list[dict] = []
    ids = [8]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            for number in itertools.count():
                if not (first := await reader.readline()) or number == answers_per_connection:
                    break
                length = 0
                while (line := (await reader.readline()).strip()):
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                body = json.loads(await reader.readexactly(length)) if length else None
                await _respond(writer, urlsplit(first.split()[1].decode()).path, body)
        writer.close()

    async def _respond(writer, path, body) -> None:
        if body is None:
            found = {"/v1/models": {"data": [{"id": "peer", "max_model_len": 4096}]}, "/version": {"version": "9.9"}}
            text = json.dumps(found.get(path, {})).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + text)
            return await writer.drain()
        bodies.append(body)
        if refuse is not None:
            writer.write(b"HTTP/1.1 %d no\r\nContent-Length: 4\r\n\r\nfull" % refuse)
            return await writer.drain()
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        total, prompt = 0, len(body["prompt"])
        for step in script(len(bodies) - 1):
            if isinstance(step, BaseException):
                writer.transport.abort()
                return
            await asyncio.sleep(step[0])
            total += step[1]
            choice = {"index": 0, "text": "ab" * step[1], "finish_reason": None}
            event = {"choices": [choice | ({"token_ids": ids * step[1]} if tells == "ids" else {})]}
            if tells == "running":
                event["usage"] = _usage(prompt, total, num_cached)
            await _send(writer, event)
        last = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}
        await _send(writer, last | ({"usage": _usage(prompt, total, num_cached)} if tells == "last" else {}))
        if tells not in ("nothing", "last"):
            await _send(writer, {"choices": [], "usage": _usage(prompt, total, num_cached)})
        await _send(writer, None)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", bodies
    finally:
        server.close()


async def _send(writer: asyncio.StreamWriter, event: dict | None) -> None:
    data = b"data: " + (b"[DONE]" if event is None else json.dumps(event).encode()) + b"\n\n"
    for part in (data[:7], data[7:]):  # an event need not come in one piece
        writer.write(b"%x\r\n" % len(part) + part + b"\r\n")
        await writer.drain()


def _usage(prompt: int, completion: int, cached: int) -> dict:
    details = {"cached_tokens": cached}
    return {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}


