"""Runs a server for the life of a process: start, build the engine, serve, drain on SIGTERM, exit code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable, Iterator

from jserve.config import Config
from jserve.server.app import Server
from jserve.server.engine import Engine
from jserve.server.metrics_page import metrics_page
from jserve.server.open_files import allow_open_files

log = logging.getLogger(__name__)

Front = Callable[[Server], contextlib.AbstractAsyncContextManager[object]]

_POLL_S = 0.05


async def serve(
    engine_factory: Callable[[], Awaitable[Engine]],
    config: Config,
    *,
    on_listening: Callable[[Server], None] = lambda server: None,
    on_ready: Callable[[Server], None] = lambda server: None,
    front: Front = lambda server: contextlib.nullcontext(),
) -> int:
    """Serves until SIGTERM, SIGINT or Control.Drain; returns the process's exit code.

    Health and reflection answer before the engine exists.  `engine_factory` must not block the event loop (build in a
    thread) and may be cancelled.  First signal: health NOT_SERVING, new generation calls UNAVAILABLE, what is waiting
    or running finishes within server.drain_timeout_s.  Second: what is open is cut.  Third: the default, death.
    `front` is another way in that listens as long as gRPC does.  Returns 0 after a drain, 1 where the engine stopped by
    itself.  Raises ConfigError where it cannot listen, and whatever the factory raises.
    """
    allow_open_files(config.server)
    server = Server(config)
    engine = None
    with _signals(server):
        try:
            await server.start()
            async with front(server):
                on_listening(server)
                engine = await _unless_drained(server, asyncio.ensure_future(engine_factory()))
                if engine is None or not await _wait_until_ready(server, engine):
                    return 0
                with metrics_page(config.server, engine):
                    server.attach(engine)
                    on_ready(server)
                    exit_code = await _run(server, engine)
                    await server.finish_drain()
            return exit_code
        finally:
            await server.stop()
            if engine is not None:
                await engine.close()


async def _unless_drained(server: Server, building: asyncio.Future[Engine]) -> Engine | None:
    """The engine once it is built; None where a drain came first."""
    stopping = asyncio.ensure_future(server.drain_requested.wait())
    await asyncio.wait([building, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not building.done():
        building.cancel()
        await asyncio.wait([building])
        if building.cancelled() or building.exception() is not None:
            return None
    return building.result()


async def _wait_until_ready(server: Server, engine: Engine) -> bool:
    while engine.state == "starting" and not server.drain_requested.is_set():
        await asyncio.sleep(_POLL_S)
    return not server.drain_requested.is_set()


async def _run(server: Server, engine: Engine) -> int:
    """Returns when a drain is asked for (0) or the engine stops by itself (1)."""
    while engine.state != "stopped":
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(server.drain_requested.wait(), timeout=10 * _POLL_S)
            return 0
    log.error("the engine stopped by itself; no request can be served any more")
    server.begin_drain(timeout_s=0)
    return 1


@contextlib.contextmanager
def _signals(server: Server) -> Iterator[None]:
    """SIGTERM and SIGINT drain; the second one ends the drain; from the third on the defaults hold."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    num_received = 0

    def received() -> None:
        nonlocal num_received
        num_received += 1
        if num_received == 1:
            server.begin_drain()
            return
        server.hurry()
        for number in numbers:
            loop.remove_signal_handler(number)

    for number in numbers:
        loop.add_signal_handler(number, received)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
