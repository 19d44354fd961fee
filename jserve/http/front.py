"""Runs the HTTP server in the event loop of the gRPC server, on uvicorn: listens as long as the block runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from jserve.access.certificates import context_for_http
from jserve.http.app import PEER_CERTIFICATE, make_app
from jserve.server import listen
from jserve.server.app import Server
from jserve.server.open_files import FewWords

_BACKLOG = 512
"""Connections that the kernel keeps until they are accepted."""
_STOP_GRACE_S = 0.5
"""Seconds that the last bytes of answers get to be sent when the server stops."""


@contextlib.asynccontextmanager
async def http_front(server: Server) -> AsyncIterator[None]:
    """Serves HTTP on server.http_port while the block runs, and tells the server its URL; nothing where none is set.

    Raises:
      ConfigError: the port cannot be bound.
    """
    section = server.state.config.server
    if section.http_port is None:
        yield
        return
    sockets = listen.sockets(section.host, section.http_port)
    config = uvicorn.Config(
        make_app(server.state),
        http=_Connection,
        ws="none",
        lifespan="off",
        log_config=None,  # uvicorn's loggers are under ours, and say nothing below warnings
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nobody's word about who is asking
        timeout_keep_alive=60,
        timeout_graceful_shutdown=_STOP_GRACE_S,
        backlog=_BACKLOG,
    )
    config.load()
    if server.certificates is not None:
        config.ssl = context_for_http(section, server.certificates)
    http = _Uvicorn(config)
    asyncio.get_running_loop().set_exception_handler(FewWords())
    running = asyncio.create_task(http.serve(sockets))
    try:
        while not (http.started or running.done()):
            await asyncio.sleep(0.005)
        if running.done():
            running.result()
        scheme = "http" if server.certificates is None else "https"
        server.http_url = f"{scheme}://{listen.join(section.host, sockets[0].getsockname()[1])}"
        yield
    finally:
        http.stop()
        await asyncio.wait([running])
        for connection in tuple(http.server_state.connections):
            connection.transport.abort()  # a reader that does not read
        for one in sockets:
            one.close()


class _Connection(H11Protocol):
    """Tells each request the client's certificate, which TLS has verified."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.app_state = {**self.app_state, PEER_CERTIFICATE: transport.get_extra_info("peercert")}


class _Uvicorn(uvicorn.Server):
    """Leaves the process's signals alone (`jserve.server.serve` has them), and stops when it is told to."""

    def __init__(self, config: uvicorn.Config):
        super().__init__(config)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        self.should_exit = True
        self._stopping.set()

    @contextlib.contextmanager
    def capture_signals(self):
        yield

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # the date of its headers
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), 1.0)
