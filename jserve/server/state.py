"""What the services share: the engine once there is one, the open generation calls, and whether the server drains."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

from jserve.access.gate import Gate
from jserve.access.tenants import Tenants
from jserve.config import Config
from jserve.request import Code, RequestError
from jserve.server.coalesce import Coalescer
from jserve.server.engine import Engine

RETRY_AFTER_S = 1.0
"""What a client that comes too early or too late is told: this server, or another, may be free then."""


class OpenCalls:
    """Generation calls that are open; at most `limit`."""

    def __init__(self, limit: int):
        self.limit = limit
        self._calls: set[Coalescer] = set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def __len__(self) -> int:
        return len(self._calls)

    @contextlib.contextmanager
    def admit(self, call: Coalescer) -> Iterator[None]:
        """Counts the call while the block runs; RESOURCE_EXHAUSTED at once where `limit` are open."""
        if len(self._calls) >= self.limit:
            raise RequestError(
                Code.RESOURCE_EXHAUSTED,
                f"{self.limit} generation calls are open (server.max_concurrent_streams); try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        self._calls.add(call)
        self._is_empty.clear()
        try:
            yield
        finally:
            self._calls.discard(call)
            if not self._calls:
                self._is_empty.set()

    async def wait_until_empty(self) -> None:
        await self._is_empty.wait()

    def cut(self, error: RequestError) -> int:
        """Ends every open call with `error`; the number of calls."""
        for call in tuple(self._calls):
            call.finish(error)
        return len(self._calls)


class ServerState:
    """Goes starting -> ready -> draining -> stopped, and from any of them to the right.  `engine` is set when ready."""

    def __init__(self, config: Config):
        """ConfigError where the settings of who may call cannot be used."""
        self.config = config
        self.gate = Gate(config.server)
        self.tenants = Tenants(self.gate.limits_of)
        self.engine: Engine | None = None
        self.calls = OpenCalls(config.server.max_concurrent_streams)
        self.started = time.monotonic()
        self.is_draining = False
        self.is_stopped = False

    @property
    def name(self) -> str:
        if self.is_stopped:
            return "stopped"
        if self.is_draining:
            return "draining"
        return "starting" if self.engine is None else self.engine.state

    def engine_for_requests(self) -> Engine:
        """The engine, where new requests are welcome; else UNAVAILABLE."""
        if self.is_draining or self.is_stopped:
            raise RequestError(Code.UNAVAILABLE, "the server is draining and takes no new requests",
                               retry_after_s=RETRY_AFTER_S)
        return self.engine_when_ready()

    def engine_when_ready(self) -> Engine:
        """The engine, also while draining; UNAVAILABLE while the server starts."""
        if self.engine is None:
            raise RequestError(Code.UNAVAILABLE, "the server is starting; health tells when it is ready",
                               retry_after_s=RETRY_AFTER_S)
        return self.engine
