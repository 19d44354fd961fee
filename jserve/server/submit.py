"""Hands a request to the engine and its updates to a call: the one way in, for gRPC and for HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

from jserve.access.gate import Caller
from jserve.access.tenants import Tenants
from jserve.request import Code, GenerateRequest, RequestError
from jserve.server.coalesce import Coalescer
from jserve.server.engine import Engine
from jserve.server.state import ServerState


@contextlib.asynccontextmanager
async def submitted(
    state: ServerState, request: GenerateRequest, caller: Caller, call: Coalescer
) -> AsyncIterator[None]:
    """The caller's request is in the engine, or waits for its tenant's turn, and its updates go to `call` while the
    block runs; afterwards it is aborted."""
    engine = state.engine_for_requests()
    request = dataclasses.replace(request, tenant=caller.tenant)
    with state.calls.admit(call):
        feeding = asyncio.create_task(_feed(engine, request, call, state.tenants))
        try:
            yield
        finally:
            feeding.cancel()
            await asyncio.wait([feeding])


async def _feed(engine: Engine, request: GenerateRequest, call: Coalescer, tenants: Tenants) -> None:
    """Moves the engine's updates into the call; never waits for the reader."""
    try:
        async with tenants.turn(request.tenant, request, engine.info.max_num_seqs) as turn:
            try:
                async with contextlib.aclosing(engine.generate(request)) as updates:
                    async for update in updates:
                        turn.count(update)
                        call.add(update)
            except RequestError:
                turn.refuse()
                raise
        call.finish(None if call.has_usage else RuntimeError("the engine ended a stream without usage"))
    except Exception as error:
        call.finish(error)
    finally:  # no call waits for a feed that is gone
        call.finish(RequestError(Code.CANCELLED, "the request was cancelled"))
