"""The Control service, Tokenize and Detokenize."""

import dataclasses
import json

import pytest

from jserve.proto_gen import control_pb2, control_pb2_grpc, inference_pb2 as pb, inference_pb2_grpc
from jserve.request import Code, Message, RequestError
from jserve.server.errors import from_rpc_error
from tests.support.fake_engine import FakeEngine
from tests.support.grpc_server import serving


async def test_model_info_shows_what_a_client_may_rely_on():
    async with serving(FakeEngine()) as (_, client):
        info = await client.model_info()
    assert (info.name, info.path, info.context_length, info.vocab_size) == ("fake-model", "/models/fake", 4096, 257)
    assert (info.bos_token_id, list(info.eos_token_ids)) == (256, [1, 2])
    assert (info.dtype, info.kv_dtype, info.block_size, info.num_blocks) == ("float32", "bfloat16", 32, 100)
    assert (info.family, info.num_parameters, info.attention) == ("fake", 12345, "none")
    assert (info.max_num_seqs, info.max_num_batched_tokens, info.digest) == (64, 512, "d1gest")
    assert (info.generation_defaults.temperature, info.generation_defaults.top_k) == (0.6, 40)
    assert not info.generation_defaults.HasField("top_p")
    assert dict(info.capabilities) == {"seed": True, "beam_width": False}
    assert info.has_chat_template


async def test_server_info_answers_also_while_starting():
    engine = FakeEngine()
    async with serving(None) as (server, client):
        starting = await client.server_info()
        server.attach(engine)
        ready = await client.server_info()
    assert (starting.state, starting.platform, ready.state, ready.platform) == ("starting", "", "ready", "cpu")
    assert list(ready.devices) == ["cpu:0"] and ready.version and ready.jax_version
    assert 0 <= starting.uptime_s <= ready.uptime_s < 60
    assert json.loads(starting.config_json)["model"]["dtype"] is None
    assert json.loads(ready.config_json)["model"]["dtype"] == "float32", "the resolved config"


async def test_loads_flush_and_integrity_come_from_the_engine():
    engine = FakeEngine()
    async with serving(engine, max_concurrent_streams=5) as (_, client):
        loads = await client.loads()
        for name, value in dataclasses.asdict(engine.loads()).items():
            assert getattr(loads, name) == value, name
        assert (loads.num_open_streams, loads.max_open_streams) == (0, 5)
        assert await client.flush_cache() == 7
        stub = control_pb2_grpc.ControlStub(client._channel)
        assert (await stub.CheckIntegrity(control_pb2.CheckIntegrityRequest())).ok
        engine.violations = ["block 7: owned twice"]
        assert not (await stub.CheckIntegrity(control_pb2.CheckIntegrityRequest())).ok
        assert await client.check_integrity() == ["block 7: owned twice"]


@pytest.mark.parametrize("call", ["model_info", "loads", "flush_cache", "check_integrity"])
async def test_what_needs_the_engine_is_unavailable_while_starting(call):
    async with serving(None) as (_, client):
        with pytest.raises(RequestError, match="the server is starting") as caught:
            await getattr(client, call)()
    assert (caught.value.code, caught.value.retry_after_s) == (Code.UNAVAILABLE, 1.0)


async def test_tokenize_and_detokenize():
    async with serving(FakeEngine()) as (_, client):
        assert await client.tokenize("hé") == [256, 104, 195, 169]
        assert await client.tokenize("hé", add_special_tokens=False) == [104, 195, 169]
        chat = [Message("user", "a")]
        assert await client.tokenize(chat) == list(b"<user>a<assistant>")
        assert await client.tokenize(chat, add_generation_prompt=False) == list(b"<user>a")
        assert await client.detokenize([256, 104, 195, 169]) == "<s>hé"
        assert await client.detokenize([256, 104], skip_special_tokens=True) == "h"
        assert await client.tokenize("") == [256] and await client.detokenize([]) == ""
        stub = inference_pb2_grpc.InferenceStub(client._channel)
        response = await stub.Tokenize(pb.TokenizeRequest(prompt="hé", return_token_strs=True))
        assert (response.count, response.max_model_len) == (4, 4096)
        assert list(response.token_strs) == ["<s>", "h", "\ufffd", "\ufffd"]


@pytest.mark.parametrize(("method", "request_", "field"), [
    ("Tokenize", pb.TokenizeRequest(), "prompt"),
    ("Tokenize", pb.TokenizeRequest(prompt="a", messages=[pb.Message(role="u", content="a")]), "prompt"),
    ("Tokenize", pb.TokenizeRequest(messages=[pb.Message(role="u")]), "messages[0].content"),
    ("Tokenize", pb.TokenizeRequest(messages=[pb.Message(role="nobody", content="")]), "messages"),
    ("Tokenize", pb.TokenizeRequest(prompt="a", add_generation_prompt=True), "add_generation_prompt"),
    ("Tokenize", pb.TokenizeRequest(messages=[pb.Message(role="u", content="a")], add_special_tokens=False),
     "add_special_tokens"),
    ("Detokenize", pb.DetokenizeRequest(token_ids=[0, 257]), "token_ids[1]"),
    ("Detokenize", pb.DetokenizeRequest(token_ids=[-1]), "token_ids[0]"),
    ("Abort", control_pb2.AbortRequest(), "request_id"),
    ("Drain", control_pb2.DrainRequest(timeout_s=-1), "timeout_s"),
    ("Drain", control_pb2.DrainRequest(timeout_s=float("nan")), "timeout_s"),
])
async def test_a_bad_call_is_refused_by_field(method, request_, field):
    async with serving(FakeEngine()) as (server, client):
        stubs = inference_pb2_grpc.InferenceStub(client._channel), control_pb2_grpc.ControlStub(client._channel)
        stub = next(stub for stub in stubs if hasattr(stub, method))
        with pytest.raises(Exception) as caught:
            await getattr(stub, method)(request_)
        error = from_rpc_error(caught.value)
        assert (error.code, error.field) == (Code.INVALID_ARGUMENT, field)
        assert not server.state.is_draining


async def test_profiles_are_the_engines():
    async with serving(FakeEngine()) as (_, client):
        assert await client.start_profile("/tmp/trace", 5) == "/tmp/trace:5"
        assert await client.start_profile() == "None:None"
        with pytest.raises(RequestError) as refusal:
            await client.stop_profile()
    assert refusal.value.code is Code.FAILED_PRECONDITION
