"""A reader that does not read holds up nobody, and still gets everything."""

import asyncio
import contextlib
import time

import grpc

from jserve.proto_gen import inference_pb2 as pb
from jserve.proto_gen import inference_pb2_grpc
from jserve.request import GenerateRequest, SamplingParams
from tests.support.fake_engine import FakeEngine, token_id, whole_text
from tests.support.grpc_server import serving, until

NUM_TOKENS = 30_000
# Without these the window of a connection on one machine grows to megabytes, and slow means very slow.
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536)]


@contextlib.asynccontextmanager
async def started_stream(server):
    """A stream of NUM_TOKENS of which the client has read the first message."""
    async with grpc.aio.insecure_channel(server.address, options=SMALL_WINDOW) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(pb.GenerateRequest(prompt="p", sampling_params={"max_tokens": NUM_TOKENS, "logprobs": 1}))
        yield call, await call.read()


async def test_a_reader_that_pauses_gets_the_whole_text_in_few_messages():
    engine = FakeEngine()
    async with serving(engine) as (server, client), started_stream(server) as (slow, first):
        started = time.monotonic()
        fast = await asyncio.gather(*(
            client.generate_unary(GenerateRequest(prompt="p", sampling_params=SamplingParams(max_tokens=20)))
            for _ in range(20)))
        assert time.monotonic() - started < 3
        assert {result.outputs[0].text for result in fast} == {whole_text(20)}

        await until(lambda: len(engine.finished) == 21, timeout_s=20)
        assert len(server.state.calls) == 1, "the engine is done, the reader is not"
        messages = [first]
        while (message := await slow.read()) is not grpc.aio.EOF:
            messages.append(message)
    assert "".join(message.text for message in messages) == whole_text(NUM_TOKENS)
    assert [i for message in messages for i in message.token_ids] == [token_id(i) for i in range(NUM_TOKENS)]
    assert sum(len(message.logprobs) for message in messages) == NUM_TOKENS
    assert [message.HasField("usage") for message in messages] == [False] * (len(messages) - 1) + [True]
    assert messages[-1].usage.completion_tokens == NUM_TOKENS
    assert len(messages) < NUM_TOKENS / 10


async def test_a_reader_that_never_reads_goes_when_it_cancels():
    engine = FakeEngine()
    async with serving(engine) as (server, _), started_stream(server) as (slow, _first):
        await until(lambda: engine.finished, timeout_s=20)
        assert len(server.state.calls) == 1
        slow.cancel()
        await until(lambda: not server.state.calls, timeout_s=1.0)
