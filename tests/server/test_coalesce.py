"""What a slow reader gets: the same text and ids in fewer pieces, the end once and last."""

import asyncio

import pytest

from jserve.request import FinishReason, GenerateUpdate, OutputDelta, Usage
from jserve.server.coalesce import Coalescer


def update(token: int, *, index: int = 0, last: bool = False) -> GenerateUpdate:
    reason = FinishReason.LENGTH if last else None
    return GenerateUpdate("r", [OutputDelta(index, f"{token} ", [token], finish_reason=reason)],
                          usage=Usage(1, token + 1, 0) if last else None)


async def test_a_fast_reader_gets_every_update_by_itself():
    call = Coalescer()
    for token in range(3):
        call.add(update(token))
        assert (await call.next()).outputs[0].token_ids == [token]


async def test_updates_merge_while_nobody_reads():
    call = Coalescer()
    first = update(0)
    call.add(first)
    for token in range(1, 100):
        call.add(update(token, last=token == 99))
    call.finish()
    merged = await call.next()
    assert merged.outputs[0].token_ids == list(range(100))
    assert merged.outputs[0].text == "".join(f"{token} " for token in range(100))
    assert merged.outputs[0].finish_reason is FinishReason.LENGTH
    assert merged.usage == Usage(1, 100, 0)
    assert await call.next() is None
    assert first.outputs[0].token_ids == [0], "the engine's own update is left alone"


async def test_outputs_merge_each_by_itself():
    call = Coalescer()
    for token in range(3):
        for index in (1, 0):
            call.add(update(10 * index + token, index=index))
    merged = {output.index: output.token_ids for output in (await call.next()).outputs}
    assert merged == {0: [0, 1, 2], 1: [10, 11, 12]}


async def test_logprobs_merge_where_some_deltas_have_none():
    call = Coalescer()
    call.add(GenerateUpdate("r", [OutputDelta(0, "", [])]))
    call.add(GenerateUpdate("r", [OutputDelta(0, "a", [1], logprobs=["entry"])]))
    assert (await call.next()).outputs[0].logprobs == ["entry"]


async def test_an_interval_holds_deltas_back_but_the_first_and_the_last():
    call = Coalescer(interval=4)
    sizes = []

    async def read():
        while (taken := await call.next()) is not None:
            sizes.append(len(taken.outputs[0].token_ids))

    reading = asyncio.create_task(read())
    for token in range(11):
        call.add(update(token, last=token == 10))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    call.finish()
    await reading
    assert sizes == [1, 4, 4, 2]


async def test_data_comes_before_the_error():
    call = Coalescer(interval=10)
    call.add(update(0))
    await call.next()
    call.add(update(1))
    call.finish(ValueError("broken"))
    call.finish()
    assert (await call.next()).outputs[0].token_ids == [1]
    with pytest.raises(ValueError, match="broken"):
        await call.next()


async def test_the_whole_result_is_one_update_or_the_error():
    call = Coalescer()
    waiting = asyncio.create_task(call.whole())
    for token in range(5):
        call.add(update(token, last=token == 4))
        await asyncio.sleep(0)
    assert not waiting.done()
    call.finish()
    assert (await waiting).outputs[0].token_ids == list(range(5))

    call = Coalescer()
    call.add(update(0))
    call.finish(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        await call.whole()
