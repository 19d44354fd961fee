"""An asyncio event loop in a thread of its own, for callers that are not asyncio: the offline API and `jserve chat`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import TypeVar

Result = TypeVar("Result")

CANCEL_S = 5.0
"""Seconds that cancelled work gets to clean up."""


class LoopThread:
    """Runs coroutines and streams for a calling thread.  Ctrl-C there cancels what it waits for."""

    def __init__(self, name: str):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()

    def run(self, work: Coroutine[None, None, Result]) -> Result:
        """The result of `work`, or what it raises."""
        task, done = self._start(work)
        try:
            return done.result()
        finally:
            self._cancel(task, done)

    def iterate(self, stream: AsyncIterator[Result]) -> Iterator[Result]:
        """The items of `stream` as they come.  Leaving the loop early closes the stream before it goes on."""
        items: queue.SimpleQueue = queue.SimpleQueue()
        end = object()

        async def pump() -> None:
            try:
                async for item in stream:
                    items.put(item)
            finally:
                items.put(end)
                await stream.aclose()

        task, done = self._start(pump())
        try:
            while (item := items.get()) is not end:
                yield item
            done.result()
        finally:
            self._cancel(task, done)

    def close(self) -> None:
        """Ends the thread; work that still runs is cancelled first.  Calling it again does nothing."""
        if self.closed:
            return
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _start(self, work: Coroutine) -> tuple[asyncio.Task, concurrent.futures.Future]:
        """The task on the loop, and a future that is done only when the task has cleaned up, also after a cancel."""
        started: concurrent.futures.Future = concurrent.futures.Future()
        done: concurrent.futures.Future = concurrent.futures.Future()

        def start() -> None:
            task = self._loop.create_task(work)
            task.add_done_callback(lambda task: _hand_over(task, done))
            started.set_result(task)

        self._loop.call_soon_threadsafe(start)
        return started.result(), done

    def _cancel(self, task: asyncio.Task, done: concurrent.futures.Future) -> None:
        if not done.done():
            self._loop.call_soon_threadsafe(task.cancel)
            concurrent.futures.wait([done], timeout=CANCEL_S)


def _hand_over(task: asyncio.Task, done: concurrent.futures.Future) -> None:
    if task.cancelled():
        done.set_exception(concurrent.futures.CancelledError())
    elif task.exception() is not None:
        done.set_exception(task.exception())
    else:
        done.set_result(task.result())


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
