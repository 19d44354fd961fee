import asyncio
import threading

import pytest

from jserve.loop_thread import LoopThread


@pytest.fixture
def thread():
    thread = LoopThread("test")
    yield thread
    thread.close()


def test_results_and_errors_come_back(thread):
    async def double(x):
        await asyncio.sleep(0)
        return 2 * x

    async def fail():
        raise KeyError("x")

    assert thread.run(double(4)) == 8
    with pytest.raises(KeyError):
        thread.run(fail())


def test_a_stream_is_read_item_by_item(thread):
    async def count():
        for number in range(3):
            await asyncio.sleep(0)
            yield number

    assert list(thread.iterate(count())) == [0, 1, 2]


def test_an_error_in_a_stream_comes_after_its_items(thread):
    async def fail():
        yield 1
        raise KeyError("x")

    items = thread.iterate(fail())
    assert next(items) == 1
    with pytest.raises(KeyError):
        next(items)


def test_leaving_a_stream_early_closes_it_before_going_on(thread):
    closed = threading.Event()

    async def endless():
        try:
            while True:
                await asyncio.sleep(0)
                yield 1
        finally:
            await asyncio.sleep(0.05)
            closed.set()

    items = thread.iterate(endless())
    next(items)
    items.close()
    assert closed.is_set()


def test_closing_cancels_what_runs_and_may_be_repeated():
    thread = LoopThread("test")
    cancelled = threading.Event()

    async def endless():
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def start():
        asyncio.get_running_loop().create_task(endless())
        await asyncio.sleep(0)

    thread.run(start())
    thread.close()
    thread.close()
    assert cancelled.is_set() and thread.closed
