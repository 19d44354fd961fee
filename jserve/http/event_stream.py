"""Server-sent events: an answer that is sent while it is made, and ends when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator

from starlette.responses import Response

from jserve.http.errors import error_body
from jserve.http.run import client_leaves
from jserve.request import Code, RequestError

log = logging.getLogger(__name__)

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class EventStream(Response):
    """Sends each object as one event, then `[DONE]`; an error after the first object is the last event."""

    media_type = "text/event-stream"

    def __init__(self, first: dict, rest: AsyncGenerator[dict, None]):
        """`first` has been made already: what is refused before it got a status of its own."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest

    async def __call__(self, scope, receive, send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(client_leaves(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            await self._rest.aclose()

    async def _send(self, send) -> None:
        async def send_part(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send_part(_event(self._first))
        ending = b"data: [DONE]\n\n"
        try:
            async with contextlib.aclosing(self._rest) as rest:
                async for item in rest:
                    await send_part(_event(item))
        except RequestError as error:
            ending = _event(error_body(error))
        except Exception as error:
            log.exception("a stream failed")
            failure = RequestError(Code.INTERNAL, f"internal error: {type(error).__name__}; the log has more")
            ending = _event(error_body(failure))
        await send_part(ending, more=False)


def _event(item: dict) -> bytes:
    return b"data: " + _encode(item).encode(errors="replace") + b"\n\n"
