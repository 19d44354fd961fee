"""Runs the requests of one HTTP call: one for each prompt, their updates merged, all aborted when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import TypeVar

from starlette.requests import Request

from jserve.access.gate import Caller
from jserve.request import Code, GenerateRequest, GenerateUpdate, RequestError, Usage
from jserve.server.coalesce import Coalescer
from jserve.server.state import ServerState
from jserve.server.submit import submitted

Result = TypeVar("Result")


async def updates_of(
    state: ServerState, caller: Caller, requests: Sequence[GenerateRequest]
) -> AsyncIterator[tuple[int, GenerateUpdate]]:
    """(number of the prompt, update) as they come.  The first error ends all."""
    async with _submitted(state, caller, requests) as calls:
        if len(calls) == 1:  # nearly always; without tasks an event costs a third less CPU
            while (update := await calls[0].next()) is not None:
                yield 0, update
            return
        waiting = {asyncio.create_task(_named(call.next(), number)): number for number, call in enumerate(calls)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=waiting.__getitem__):
                    number = waiting.pop(task)
                    if (update := task.result()) is not None:
                        waiting[asyncio.create_task(_named(calls[number].next(), number))] = number
                        yield number, update
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


async def results_of(
    state: ServerState, caller: Caller, requests: Sequence[GenerateRequest]
) -> list[GenerateUpdate]:
    """The whole results, in the order of the requests."""
    async with _submitted(state, caller, requests) as calls:
        if len(calls) == 1:
            return [await calls[0].whole()]
        return await asyncio.gather(*(_named(call.whole(), number) for number, call in enumerate(calls)))


async def _named(work: Awaitable[Result], number: int) -> Result:
    try:
        return await work
    except RequestError as error:
        raise of_item(error, f"prompt[{number}]") from None


def of_item(error: RequestError, item: str) -> RequestError:
    """Speaks of one item of the body, such as `prompt[1]` or `input`, where the engine speaks of the prompt."""
    for ours in ("prompt_token_ids", "prompt"):
        if (error.field or "").startswith(ours):
            return RequestError(
                error.code, error.message.replace(ours, item, 1), field=item + error.field.removeprefix(ours),
                retry_after_s=error.retry_after_s,
            )  # fmt: skip
    return error


def total_usage(usages: Sequence[Usage]) -> dict:
    """OpenAI's `usage` over all prompts of a call."""
    prompt, completion = sum(usage.prompt_tokens for usage in usages), sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }


async def while_connected(request: Request, work: Awaitable[Result]) -> Result:
    """The work's result; cancels it, and raises CANCELLED, when the client leaves first."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(client_leaves(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RequestError(Code.CANCELLED, "the client left")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def client_leaves(receive) -> None:
    """Returns when the connection is gone.  The request's body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


@contextlib.asynccontextmanager
async def _submitted(
    state: ServerState, caller: Caller, requests: Sequence[GenerateRequest]
) -> AsyncIterator[list[Coalescer]]:
    calls = [Coalescer() for _ in requests]
    async with contextlib.AsyncExitStack() as stack:
        for request, call in zip(requests, calls):
            await stack.enter_async_context(submitted(state, request, caller, call))
        yield calls
