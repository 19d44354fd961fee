"""HTTP shares the life of the gRPC server: health, limits, metrics, a client that leaves, drain."""

import asyncio
import json
import random
import signal
import time
from types import SimpleNamespace
from urllib.parse import urlsplit

import openai
import pytest

from jserve.config import ConfigError
from tests.support.fake_engine import FakeEngine, whole_text
from tests.support.grpc_server import http_server_process, serving, until
from tests.support.http_server import ask, events, http_serving, openai_client, post

MODEL = "fake-model"
HELLO = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "f"}}
ENDLESS = {"prompt": "p", "max_tokens": 10**6}


async def test_health_tells_the_state_and_generation_waits_for_ready():
    engine = FakeEngine()
    async with serving(None, http_port=0) as (server, _):
        health = await ask(server, "GET", "/health")
        assert (health.status, health.json) == (503, {"status": "starting"})
        refused = await post(server, "/v1/completions", {"prompt": "p"})
        assert refused.status == 503 and "starting" in refused.error["message"] and refused.headers["retry-after"]
        server.attach(engine)
        assert (await ask(server, "GET", "/health")).json == {"status": "ready"}
        server.begin_drain()
        assert (await ask(server, "GET", "/health")).json == {"status": "draining"}
        refused = await post(server, "/v1/completions", {"prompt": "p"})
        assert refused.status == 503 and "draining" in refused.error["message"]


async def test_models_and_metrics():
    async with http_serving(FakeEngine()) as (server, client):
        [model] = (await client.models.list()).data
        assert (model.id, model.owned_by, model.max_model_len) == (MODEL, "jserve", 4096)
        assert (await client.models.retrieve(MODEL)).id == MODEL
        metrics = await ask(server, "GET", "/metrics")
        assert metrics.status == 200 and metrics.headers["content-type"].startswith("text/plain")


async def test_tokenize_and_back():
    async with http_serving(FakeEngine()) as (server, _):
        tokens = await post(server, "/tokenize", {"prompt": "ab", "return_token_strs": True})
        assert tokens.json == {
            "count": 3, "max_model_len": 4096, "tokens": [256, 97, 98], "token_strs": ["<s>", "a", "b"]}
        plain = await post(server, "/tokenize", {"model": MODEL, "prompt": "ab", "add_special_tokens": False})
        assert plain.json["tokens"] == [97, 98]
        chat = await post(server, "/tokenize", {"messages": [{"role": "user", "content": "x"}]})
        assert bytes(chat.json["tokens"]).decode() == "<user>x<assistant>"
        assert (await post(server, "/detokenize", {"tokens": [97, 98]})).json == {"prompt": "ab"}
        spans = await post(server, "/tokenize", {"prompt": "aé", "return_offsets": True})
        assert spans.json["offsets"] == [[0, 0], [0, 1], [1, 2], [1, 2]]
        back = await post(server, "/detokenize", {"tokens": spans.json["tokens"], "return_offsets": True})
        assert back.json == {"prompt": "<s>aé", "offsets": [[0, 3], [3, 4], [4, 4], [4, 5]]}
        shown = await post(server, "/tokenize", {"messages": HELLO, "tools": [TOOL]})
        assert bytes(shown.json["tokens"]).decode() == "[f]<user>x<assistant>"
        facts = (await ask(server, "GET", "/tokenizer_info")).json
        assert (facts["bos_token"], facts["eos_token"], facts["model_max_length"]) == ("<s>", "\x02", 4096)
        for path, body, param in (("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": "x", "y": 1}, "y"),
                                  ("/tokenize", {"messages": []}, "messages"),
                                  ("/tokenize", {"prompt": "x", "messages": []}, "messages"),
                                  ("/tokenize", {"prompt": "x", "tools": [TOOL]}, "tools"),
                                  ("/tokenize", {"messages": HELLO, "return_offsets": True}, "return_offsets"),
                                  ("/tokenize", {"messages": HELLO, "tools": [{}]}, "tools[0]"),
                                  ("/detokenize", {}, "tokens"), ("/detokenize", {"tokens": "a"}, "tokens"),
                                  ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
                                  ("/detokenize", {"tokens": [97, True]}, "tokens[1]"),
                                  ("/detokenize", {"tokens": [2**70]}, "tokens[0]"),
                                  ("/detokenize", {"tokens": [999]}, "tokens[0]")):
            refused = await post(server, path, body)
            assert (refused.status, refused.error["param"]) == (400, param)
            assert refused.error["message"].startswith(param)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["queued", "running"])
async def test_a_client_that_leaves_aborts_its_requests(stream, when):
    engine = FakeEngine(step_s=0.005)
    if when == "queued":
        engine.go.clear()
    async with http_serving(engine) as (server, _):
        address = urlsplit(server.http_url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        body = json.dumps({**ENDLESS, "prompt": ["a", "b"], "stream": stream}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                     b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        await until(lambda: len(engine.running) == 2)
        if stream and when == "running":
            assert await reader.readuntil(b"w1 ")
        writer.transport.abort()
        await until(lambda: not engine.running and len(engine.aborted) == 2, timeout_s=1.0)
        await until(lambda: not len(server.state.calls), timeout_s=1.0)


async def test_200_streams_that_leave_at_random_moments_leave_nothing_behind():
    engine, draw = FakeEngine(step_s=0.002, max_running=50), random.Random(1)
    async with http_serving(engine) as (server, client):
        address = urlsplit(server.http_url)

        async def start_and_leave(stream: bool, wait_s: float) -> None:
            _, writer = await asyncio.open_connection(address.hostname, address.port)
            body = json.dumps({**ENDLESS, "stream": stream}).encode()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                         b"Content-Length: %d\r\n\r\n%s" % (len(body), body[: draw.choice((len(body), 20))]))
            await asyncio.sleep(wait_s)
            writer.transport.abort()

        await asyncio.gather(*(start_and_leave(draw.random() < 0.7, draw.random() * 0.4) for _ in range(200)))
        await until(lambda: not server.state.calls and not engine.running and not engine.waiting, timeout_s=2.0)
        assert sorted(engine.aborted) == sorted(request.request_id for request in engine.requests)
        answers = await asyncio.gather(*(
            client.completions.create(model=MODEL, prompt="p", max_tokens=4) for _ in range(8)))
        assert {answer.choices[0].text for answer in answers} == {whole_text(4)}


async def test_300_short_streams_are_whole_and_end_once():
    async with http_serving(FakeEngine()) as (server, _):
        answers = await asyncio.gather(*(
            post(server, "/v1/completions", {"prompt": "p", "max_tokens": 1 + n % 5, "stream": True,
                                             "stream_options": {"include_usage": True}}) for n in range(300)))
    for number, answer in enumerate(answers):
        *pieces, last, done = events(answer)
        count = 1 + number % 5
        assert done == "[DONE]" and last["usage"]["completion_tokens"] == count
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole_text(count)
        assert [piece["choices"][0]["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]


async def test_the_first_refused_prompt_ends_its_siblings():
    engine = FakeEngine(step_s=0.005)
    engine.failures["bad"] = (3, ValueError("x"))
    async with http_serving(engine) as (server, _):
        answer = await post(server, "/v1/completions", {**ENDLESS, "prompt": ["a", "bad", "c"]})
        assert answer.status == 500
        await until(lambda: not engine.running)
    assert len(engine.aborted) == 3


async def test_http_and_grpc_share_the_limit_of_open_calls():
    engine = FakeEngine()
    engine.go.clear()
    async with http_serving(engine, max_concurrent_streams=2) as (server, client):
        asking = asyncio.create_task(client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=1))
        await until(lambda: len(engine.running) == 2)
        with pytest.raises(openai.RateLimitError, match="max_concurrent_streams"):
            await client.completions.create(model=MODEL, prompt="c")
        engine.go.set()
        assert len((await asking).choices) == 2


async def test_a_running_request_id_is_refused_and_control_can_abort_it():
    engine = FakeEngine(step_s=0.005)
    async with serving(engine, http_port=0) as (server, grpc_client):
        body = {**ENDLESS, "request_id": "mine"}
        asking = asyncio.create_task(post(server, "/v1/completions", body))
        await until(lambda: "mine" in engine.running)
        twice = await post(server, "/v1/completions", body)
        assert (twice.status, twice.error["param"]) == (409, "request_id")
        assert await grpc_client.abort("mine")
        assert (await asking).json["choices"][0]["finish_reason"] == "abort"


async def test_a_slow_reader_gets_everything_and_holds_up_nobody():
    async with http_serving(FakeEngine()) as (server, client):
        stream = await client.completions.create(model=MODEL, prompt="p", max_tokens=4000, stream=True)
        quick = await client.completions.create(model=MODEL, prompt="q", max_tokens=5)
        assert quick.choices[0].text == whole_text(5)
        await asyncio.sleep(0.2)
        assert "".join([piece.choices[0].text async for piece in stream]) == whole_text(4000)


async def test_a_drain_finishes_open_streams_then_the_process_exits_0():
    with http_server_process() as (process, url):
        server = SimpleNamespace(http_url=url)
        assert process.stdout.readline().startswith("ready ")
        async with openai_client(server) as client:
            stream = await client.completions.create(model=MODEL, prompt="p", max_tokens=60, stream=True)
            text = (await anext(stream)).choices[0].text
            process.send_signal(signal.SIGTERM)
            while (await ask(server, "GET", "/health")).status == 200:
                await asyncio.sleep(0.01)
            assert (await post(server, "/v1/completions", {"prompt": "p"})).status == 503
            async for piece in stream:
                text += piece.choices[0].text
            assert text == whole_text(60)
            assert await asyncio.to_thread(process.wait, 20) == 0  # below the default limit of a drain


async def test_the_drain_limit_cuts_a_stream_with_an_error_event():
    with http_server_process("--drain-timeout-s", "0.2") as (process, url):
        server = SimpleNamespace(http_url=url)
        assert process.stdout.readline().startswith("ready ")
        async with openai_client(server) as client:
            stream = await client.completions.create(model=MODEL, prompt="p", max_tokens=10**6, stream=True)
            await anext(stream)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.APIError, match="stopped before the request was finished"):
                async for _ in stream:
                    pass
            assert await asyncio.to_thread(process.wait, 20) == 0  # below the default limit of a drain


async def test_a_client_that_never_reads_does_not_outlast_the_server():
    engine = FakeEngine()
    async with serving(engine, http_port=0, drain_timeout_s=0.2) as (server, _):
        address = urlsplit(server.http_url)
        _, writer = await asyncio.open_connection(address.hostname, address.port, limit=1)
        body = json.dumps({**ENDLESS, "stream": True}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                     b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        await until(lambda: engine.running)
        await asyncio.sleep(0.2)
        server.begin_drain()
        assert await server.finish_drain() == 1
        started = time.monotonic()
    assert time.monotonic() - started < 2.5
    writer.close()


async def test_a_port_in_use_is_one_clear_line():
    async with http_serving(FakeEngine()) as (first, _):
        port = urlsplit(first.http_url).port
        message = f"^server.http_port = {port}: already in use on 127.0.0.1; .*--http-port"
        with pytest.raises(ConfigError, match=message):
            async with serving(FakeEngine(), http_port=port):
                pass
    with pytest.raises(ConfigError, match="server.http_port = 70000: must be in 0..65535"):
        async with serving(FakeEngine(), http_port=70000):
            pass
