"""Several requests to the engine for one call, a bounded number of them at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from jserve.access.gate import Caller
from jserve.request import GenerateRequest, GenerateUpdate
from jserve.server.coalesce import Coalescer
from jserve.server.state import ServerState
from jserve.server.submit import submitted

Result = TypeVar("Result")


async def whole_result(
    state: ServerState, request: GenerateRequest, caller: Caller, room: asyncio.Semaphore
) -> GenerateUpdate:
    """The request's whole answer; it reaches the engine when there is room."""
    call = Coalescer()
    async with room, submitted(state, request, caller, call):
        return await call.whole()


async def in_order(works: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Results in order; the first error cancels the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
