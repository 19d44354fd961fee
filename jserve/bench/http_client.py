"""HTTP/1.1 as a bench needs it: GET a JSON object, POST one and read server-sent events, connections kept open.

A few lines over asyncio's streams cost the client a fraction of what a full HTTP library does, and need no package.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from jserve.request import Code, RequestError

CODES = {
    400: Code.INVALID_ARGUMENT, 401: Code.UNAUTHENTICATED, 403: Code.PERMISSION_DENIED, 404: Code.NOT_FOUND,
    408: Code.DEADLINE_EXCEEDED, 422: Code.INVALID_ARGUMENT, 429: Code.RESOURCE_EXHAUSTED, 499: Code.CANCELLED,
    501: Code.UNIMPLEMENTED, 502: Code.UNAVAILABLE, 503: Code.UNAVAILABLE, 504: Code.DEADLINE_EXCEEDED,
}
MAX_LINE_BYTES = 16 * 2**20


@dataclass
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.writer.close()


class HttpClient:
    """Belongs to the event loop in which it is used.  Errors are RequestError, UNAVAILABLE where nothing answers."""

    def __init__(self, base_url: str, token: str | None = None, ca_file: str | None = None):
        """`base_url` such as http://127.0.0.1:8000; `ca_file` (PEM) signed an https server's certificate."""
        parts = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RequestError(Code.INVALID_ARGUMENT, f"{base_url!r}: expected http://HOST:PORT or https://HOST:PORT")
        self._host = parts.hostname
        self._ssl = ssl.create_default_context(cafile=ca_file) if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = f"Host: {parts.netloc}\r\n" + (f"Authorization: Bearer {token}\r\n" if token else "")
        self._idle: list[_Connection] = []

    async def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def get(self, path: str) -> object:
        """The JSON of a GET."""
        async with self._answer("GET", path, b"") as lines:
            return json.loads(b"".join([part async for part in lines]))

    async def answers(self, path: str) -> bool:
        """Whether a GET has status 200, whatever it says.  RequestError where it has another."""
        async with self._answer("GET", path, b""):
            return True

    async def events(self, path: str, message: object) -> AsyncIterator[dict]:
        """The data of each server-sent event of a POST, up to [DONE]."""
        async with self._answer("POST", path, json.dumps(message).encode()) as parts:
            rest = b""
            async for part in parts:
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    data = line.removeprefix(b"data:").strip()
                    if line.startswith(b"data:") and data != b"[DONE]":
                        yield _event(data)

    @contextlib.asynccontextmanager
    async def _answer(self, method: str, path: str, body: bytes) -> AsyncIterator[AsyncIterator[bytes]]:
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}Accept: */*\r\n"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        connection = None
        whole = False
        try:
            connection, status, headers = await self._send(f"{head}\r\n".encode() + body)
            parts = _body(connection.reader, headers)
            if status != 200:
                text = b"".join([part async for part in parts]).decode(errors="replace")
                raise RequestError(CODES.get(status, Code.INTERNAL), f"HTTP {status}: {text[:500]}")
            yield parts
            async for _ in parts:  # what a reader left, so that the connection can be used again
                pass
            whole = headers.get("connection", "").lower() != "close"
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            where = f"{self._host}:{self._port}"
            raise RequestError(Code.UNAVAILABLE, f"{where}: {error or type(error).__name__}") from None
        finally:
            if connection is not None:
                self._idle.append(connection) if whole else connection.close()

    async def _send(self, request: bytes) -> tuple[_Connection, int, dict[str, str]]:
        """A kept connection may have been closed by the server as we wrote: before any answer, another is tried."""
        while True:
            kept = self._idle.pop() if self._idle else None
            if kept is not None and kept.reader.at_eof():
                kept.close()
                continue
            connection = kept or await self._connect()
            try:
                connection.writer.write(request)
                await connection.writer.drain()
                return connection, *await _head(connection.reader)
            except (OSError, EOFError):
                connection.close()
                if kept is None:
                    raise
            except BaseException:
                connection.close()
                raise

    async def _connect(self) -> _Connection:
        return _Connection(
            *await asyncio.open_connection(self._host, self._port, ssl=self._ssl, limit=MAX_LINE_BYTES)
        )


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first = await reader.readline()
    if not first:
        raise EOFError("the server closed the connection")
    status = int(first.split()[1])
    headers = {}
    while (line := (await reader.readline()).strip()):
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return status, headers


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while True:
            size = int((await reader.readline()).split(b";")[0] or b"x", 16)  # an end in the middle is a ValueError
            if size == 0:
                await reader.readline()
                return
            yield await reader.readexactly(size)
            await reader.readline()
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        headers["connection"] = "close"
        while part := await reader.read(65536):
            yield part


def _event(data: bytes) -> dict:
    event = json.loads(data)
    if isinstance(event, dict) and event.get("error"):
        raise RequestError(Code.INTERNAL, str(event["error"])[:500])
    return event
