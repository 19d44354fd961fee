"""Hands a request to the engine and its updates to a call: the one way in, for gRPC and for HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from jserve.request import Code, GenerateRequest, RequestError
from jserve.server.coalesce import Coalescer
from jserve.server.engine import Engine
from jserve.server.state import ServerState


@contextlib.asynccontextmanager
async def submitted(state: ServerState, request: GenerateRequest, call: Coalescer) -> AsyncIterator[None]:
    """The request is in the engine and its updates go to `call` while the block runs; afterwards it is aborted."""
    engine = state.engine_for_requests()
    with state.calls.admit(call):
        feeding = asyncio.create_task(_feed(engine, request, call))
        try:
            yield
        finally:
            feeding.cancel()
            await asyncio.wait([feeding])


async def _feed(engine: Engine, request: GenerateRequest, call: Coalescer) -> None:
    """Moves the engine's updates into the call; never waits for the reader."""
    try:
        async with contextlib.aclosing(engine.generate(request)) as updates:
            async for update in updates:
                call.add(update)
        call.finish(None if call.has_usage else RuntimeError("the engine ended a stream without usage"))
    except Exception as error:
        call.finish(error)
    finally:  # no call waits for a feed that is gone
        call.finish(RequestError(Code.CANCELLED, "the request was cancelled"))
