"""Thousands of streams of a few tokens: each is complete, and its end comes once and last."""

import asyncio
import random

import grpc
import pytest

from jserve.proto_gen import inference_pb2 as pb
from jserve.proto_gen import inference_pb2_grpc
from tests.support.fake_engine import FakeEngine, token_id, whole_text
from tests.support.grpc_server import serving

CONCURRENT = 64


async def run(num_streams: int) -> None:
    engine = FakeEngine()
    draw = random.Random(3)
    todo = [(draw.randint(1, 5), draw.random() < 0.1) for _ in range(num_streams)]

    async def read_all(stub, num_tokens: int, reads_slowly: bool) -> None:
        messages = []
        call = stub.Generate(pb.GenerateRequest(prompt="p", sampling_params={"max_tokens": num_tokens}))
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
            if reads_slowly:
                await asyncio.sleep(0.01)
        assert [i for message in messages for i in message.token_ids] == [token_id(i) for i in range(num_tokens)]
        assert "".join(message.text for message in messages) == whole_text(num_tokens)
        is_last = [False] * (len(messages) - 1) + [True]
        assert [message.HasField("usage") for message in messages] == is_last
        assert [message.HasField("finish_reason") for message in messages] == is_last
        assert messages[-1].usage.completion_tokens == num_tokens
        assert await call.code() is grpc.StatusCode.OK

    async def worker(stub) -> None:
        while todo:
            await read_all(stub, *todo.pop())

    async with serving(engine) as (server, client):
        stub = inference_pb2_grpc.InferenceStub(client._channel)
        await asyncio.gather(*(worker(stub) for _ in range(CONCURRENT)))
        assert len(server.state.calls) == 0
    assert len(engine.finished) == num_streams and engine.aborted == []


async def test_1000_short_streams():
    await run(1000)


@pytest.mark.soak
async def test_10000_short_streams():
    await run(10_000)
