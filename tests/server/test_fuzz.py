"""Random bytes and random field values against a live server over a real engine: an answer or a clear refusal, always.

Never INTERNAL, never a call that outlives its deadline, and nothing left behind: `running_engine` checks the blocks after
every step, and that none is in use at the end.
"""

from __future__ import annotations

import asyncio
import os
import random
import time

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

from jserve.proto_gen import control_pb2, inference_pb2 as pb
from jserve.request import GenerateRequest, SamplingParams
from tests.support.engines import running_engine, wait_idle
from tests.support.grpc_server import serving
from tests.support.tiny_models import random_gguf

LEFT_OUT = {"Drain", "StartProfile", "StopProfile"}
"""The one ends the server, the others write to folders that the request names."""
METHODS = [method for module in (pb, control_pb2) for service in module.DESCRIPTOR.services_by_name.values()
           for method in service.methods if method.name not in LEFT_OUT]
GENERATING = [method for method in METHODS if method.name in ("Generate", "GenerateUnary", "Embed", "Score")]
FINE = {grpc.StatusCode[name] for name in (
    "OK INVALID_ARGUMENT NOT_FOUND ALREADY_EXISTS RESOURCE_EXHAUSTED DEADLINE_EXCEEDED CANCELLED UNIMPLEMENTED"
    " FAILED_PRECONDITION").split()}
GRACE_S = 30
"""A busy machine, not a hang."""

INTEGERS = [0, 1, 2, 3, 7, 16, 64, 65, 255, 256, 511, 512, 1024, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1]
FLOATS = [0.0, -0.0, 0.001, 0.5, 0.9, 1.0, 1.5, 2.0, 100.0, -1.0, 1e-45, 1e38, float("inf"), float("nan")]
TEXTS = ["", "a", "the rain in spain", "é\U0001f600\ufffd", "\0", "<|im_end|>", "x" * 300, "{", "[a-z]+", "a{1,3}", "(", "(a|b)*c",
         '{"type": "object"}', '{"type": "array", "items": {"type": "integer"}}', '{"enum": [1, "a"]}', '{"$ref": "#"}',
         'start: "a" | "b" start', "start: /x+/", "root ::= [0-9]+", "user", "system", '{"function": {"name": "f"}}']


def random_value(draw: random.Random, field: FieldDescriptor):
    if field.type == FieldDescriptor.TYPE_STRING:
        return draw.choice(TEXTS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return draw.randbytes(draw.randrange(9))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return draw.random() < 0.5
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return draw.choice(FLOATS)
    if field.type == FieldDescriptor.TYPE_ENUM:
        return draw.choice([0, 1, 2, 3, 9, -1])
    is_signed = field.type in (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_INT64)
    is_long = field.type in (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64)
    value = draw.choice(INTEGERS) & (2**63 - 1 if is_long else 2**31 - 1)
    return -value if is_signed and draw.random() < 0.2 else value


def fill(draw: random.Random, message, share: float) -> None:
    """Sets about `share` of the fields, of messages inside too."""
    for field in message.DESCRIPTOR.fields:
        if draw.random() > share:
            continue
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, entry = field.message_type.fields
            for _ in range(draw.randrange(4)):
                value[abs(random_value(draw, key))] = random_value(draw, entry)
        elif field.is_repeated:
            for _ in range(draw.choice([1, 1, 2, 5])):
                if field.message_type is None:
                    value.append(random_value(draw, field))
                else:
                    fill(draw, value.add(), 0.6)
        elif field.message_type is not None:
            value.SetInParent()
            fill(draw, value, share)
        else:
            setattr(message, field.name, random_value(draw, field))


def random_message(draw: random.Random, method):
    message = GetMessageClass(method.input_type)()
    if method in GENERATING and draw.random() < 0.8:  # something that may well run, and a few fields besides
        fill(draw, message, 0.05)
        for name in ("prompt", "prompt_token_ids", "messages", "request_id", "lora_name"):
            if name in message.DESCRIPTOR.fields_by_name:
                message.ClearField(name)
        message.prompt = draw.choice(["the rain", "a", "in spain stays mainly " * 3])
        if method.name == "Score":
            message.continuations.append("x")
        if method.name.startswith("Generate"):
            fill(draw, message.sampling_params, draw.choice([0.0, 0.05, 0.1]))
            message.sampling_params.max_tokens = draw.choice([0, 1, 5, 20])
    else:
        fill(draw, message, draw.choice([0.1, 0.3, 0.7]))
    return message


def mutated(draw: random.Random, data: bytes) -> bytes:
    data = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 5])):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(4):
            case 0:
                del data[at : at + draw.randrange(1, 8)]
            case 1:
                data[at:at] = draw.randbytes(draw.randrange(1, 8))
            case 2:
                data[at : at + 1] = draw.randbytes(1)
            case _:
                data += data[at:]
    return bytes(data)


def random_call(draw: random.Random) -> tuple:
    """(method, bytes of its request, deadline)"""
    method = draw.choice(GENERATING if draw.random() < 0.7 else METHODS)
    kind = draw.random()
    data = random_message(draw, method).SerializeToString() if kind < 0.85 else draw.randbytes(draw.randrange(80))
    if 0.6 < kind < 0.85:
        data = mutated(draw, data)
    return method, data, draw.choice([0.02, 0.3, 3.0, 3.0, 3.0])


async def code_of(channel: grpc.aio.Channel, method, data: bytes, deadline_s: float, leaves: bool) -> grpc.StatusCode:
    """How the call ended; some clients leave in the middle."""
    name = f"/{method.containing_service.full_name}/{method.name}"
    make = channel.unary_stream if method.server_streaming else channel.unary_unary
    call = make(name)(data, timeout=deadline_s)
    if leaves:
        await asyncio.sleep(0.01)
        call.cancel()
    return await asyncio.wait_for(_drained(call, method.server_streaming), deadline_s + GRACE_S)


async def _drained(call, is_stream: bool) -> grpc.StatusCode:
    try:
        if is_stream:
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError:
        pass
    except asyncio.CancelledError:
        if not call.cancelled():
            raise
    return await call.code()


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = random_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")
    with running_engine(path, kv={"num_blocks": 40, "memory_bytes": None, "block_size": 16}) as engine:
        yield engine


async def fuzz(engine, seed: int, seconds: float) -> dict[grpc.StatusCode, int]:
    """Eight clients for so long; the codes that they got.  Afterwards the server serves as before."""
    end, codes = time.monotonic() + seconds, {}

    async def client_of(channel: grpc.aio.Channel, number: int) -> None:
        draw = random.Random(f"{seed} {number}")
        while time.monotonic() < end:
            method, data, deadline_s = random_call(draw)
            code = await code_of(channel, method, data, deadline_s, leaves=draw.random() < 0.1)
            assert code in FINE, (code, method.full_name, data)
            codes[code] = codes.get(code, 0) + 1

    async with serving(engine, max_message_bytes=2**20) as (server, client):
        await asyncio.gather(*(client_of(client._channel, number) for number in range(8)))
        await asyncio.to_thread(wait_idle, engine)
        assert not server.state.calls
        assert await client.check_integrity() == []
        assert (await client.loads()).kv_usage == 0
        request = GenerateRequest(prompt="x", sampling_params=SamplingParams(max_tokens=3, ignore_eos=True))
        assert len((await client.generate_unary(request)).outputs[0].token_ids) == 3
    return codes


async def test_random_requests_are_answered_or_refused(engine):
    codes = await fuzz(engine, seed=5, seconds=60)
    assert codes[grpc.StatusCode.OK] > 20 and codes[grpc.StatusCode.INVALID_ARGUMENT] > 20, codes


@pytest.mark.soak
@pytest.mark.timeout(0)
async def test_random_requests_for_ten_minutes(engine):
    seed = int(os.environ.get("FUZZ_SEED", time.time()))
    print(f"FUZZ_SEED={seed}", await fuzz(engine, seed, seconds=600))
