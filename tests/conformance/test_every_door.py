"""Every field of SamplingParams reaches the engine through every door: gRPC, both of HTTP, a line of `batch`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from jserve.cli.request_json import json_fields, request_from_fields
from jserve.request import EarlyStopping, GenerateRequest, SamplingParams
from tests.server.test_proto_convert import EVERY_FIELD
from tests.support.fake_engine import FakeEngine
from tests.support.grpc_server import serving
from tests.support.http_server import post

VALUES = {field.name: getattr(EVERY_FIELD, field.name) for field in dataclasses.fields(SamplingParams)}
# What JSON cannot say, or no door lets through to the engine's validator.
VALUES |= {"logit_bias": {5: 1.5}, "seed": 7, "max_tokens": 3, "min_tokens": 1, "stop_token_ids": [9], "json_object": True}


def spelled(name: str) -> Any:
    value = VALUES[name]
    return value.value if isinstance(value, EarlyStopping) else value


async def by_grpc(field: str, engine: FakeEngine) -> None:
    async with serving(engine) as (_, client):
        request = GenerateRequest(prompt="p", sampling_params=SamplingParams(**{field: VALUES[field]}))
        await client.generate_unary(request)
        async for _ in client.generate(request):
            pass


async def by_completions(field: str, engine: FakeEngine) -> None:
    async with serving(engine, http_port=0) as (server, _):
        await answered(server, "/v1/completions", {"prompt": "p", field: spelled(field)})


async def by_chat(field: str, engine: FakeEngine) -> None:
    # OpenAI's chat spells this one in two fields.
    fields = {"logprobs": True, "top_logprobs": spelled(field)} if field == "logprobs" else {field: spelled(field)}
    async with serving(engine, http_port=0) as (server, _):
        await answered(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": "p"}], **fields})


async def answered(server, path: str, body: dict) -> None:
    answer = await post(server, path, body)
    assert answer.status == 200, answer.body


async def by_batch(field: str, engine: FakeEngine) -> None:
    value = spelled(field).upper() if field == "early_stopping" else spelled(field)
    line = json.dumps({"prompt": "p", "sampling_params": {field: value}}).encode()
    async for _ in engine.generate(request_from_fields(json_fields(line))):
        pass


@pytest.mark.parametrize("door", [by_grpc, by_completions, by_chat, by_batch])
async def test_a_field_arrives_as_it_was_sent(door: Callable):
    for field, value in VALUES.items():
        engine = FakeEngine()
        await door(field, engine)
        for request in engine.requests:
            assert getattr(request.sampling_params, field) == value, field
        assert engine.requests, field
