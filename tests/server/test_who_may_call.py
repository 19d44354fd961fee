"""Who may call over gRPC and HTTP, on real sockets: tokens, tenants, TLS, mutual TLS, proxies, limits; and logs."""

import asyncio
import contextlib
import logging
import socket
import ssl
from pathlib import Path

import grpc
import openai
import pytest

from jserve.config import ConfigError
from jserve.http.front import http_front
from jserve.proto_gen import inference_pb2 as pb, inference_pb2_grpc
from jserve.request import Code, GenerateRequest, RequestError, SamplingParams
from jserve.server.app import Server
from jserve.server.async_client import AsyncClient
from jserve.server.client import Client
from jserve.server.client_common import ClientTls
from tests.support.auth import BLUE, RED, ROOT, auth_file, entry
from tests.support.certificates import Authority, https_context
from tests.support.fake_engine import FakeEngine, whole_text
from tests.support.grpc_server import config, until
from tests.support.http_server import ask, openai_client, post

SECRET = "the launch code is 0000"
HELLO = GenerateRequest(prompt=SECRET, sampling_params=SamplingParams(max_tokens=2))
ENDLESS = GenerateRequest(prompt=SECRET, sampling_params=SamplingParams(max_tokens=10**6))


@contextlib.asynccontextmanager
async def running(engine=None, **section):
    """A server with HTTP and its engine."""
    server = Server(config(http_port=0, **section))
    await server.start()
    try:
        async with http_front(server):
            server.attach(engine or FakeEngine())
            yield server
    finally:
        await server.stop()


async def code_of(server, request=HELLO, **client) -> Code | None:
    """None where the call was served."""
    async with AsyncClient(server.address, **client) as caller:
        try:
            result = await caller.generate_unary(request)
        except RequestError as error:
            return error.code
    assert result.outputs[0].text == whole_text(2)
    return None


def tenants_of(server) -> list:
    return [request.tenant for request in server.state.engine.requests]


# Tokens


async def test_tokens_decide_over_grpc(tmp_path):
    async with running(auth_file=auth_file(tmp_path)) as server:
        assert await code_of(server) is Code.UNAUTHENTICATED
        assert await code_of(server, token="wrong") is Code.UNAUTHENTICATED
        assert await code_of(server, token=RED) is None
        assert await code_of(server, token=BLUE) is None
        assert tenants_of(server) == ["red", "blue"]
        async with AsyncClient(server.address) as nobody:
            assert await nobody.is_serving(), "health stays open"
            for call in (nobody.tokenize("x"), nobody.model_info(), nobody.server_info(), nobody.loads()):
                with pytest.raises(RequestError) as caught:
                    await call
                assert caught.value.code is Code.UNAUTHENTICATED
            for stub in (nobody._inference.Embed, nobody._inference.Score):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub(b"" if stub is None else pb.EmbedRequest() if stub is nobody._inference.Embed
                               else pb.ScoreRequest())
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, "also what is not built"
        with Client(server.address, token=RED) as blocking:
            assert await asyncio.to_thread(lambda: blocking.model_info().name) == "fake-model"


async def test_tokens_decide_over_http(tmp_path):
    async with running(auth_file=auth_file(tmp_path)) as server:
        assert (await ask(server, "GET", "/health")).status == 200, "health stays open"
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": RED}):
            for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("POST", "/v1/completions"),
                                 ("POST", "/v1/chat/completions"), ("POST", "/v1/embeddings"), ("POST", "/tokenize")):
                answer = await ask(server, method, path, {} if method == "POST" else None, headers=headers)
                assert (answer.status, answer.error["type"]) == (401, "authentication_error"), path
                assert answer.headers["www-authenticate"] == "Bearer"
        async with openai_client(server, api_key=RED) as client:
            await client.completions.create(model="fake-model", prompt="x")
        async with openai_client(server, api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.completions.create(model="fake-model", prompt="x")
        assert tenants_of(server) == ["red"]
        spoofed = await post(server, "/v1/completions", {"prompt": "x"},
                             headers={"Authorization": f"Bearer {RED}", "X-Jserve-Tenant": "blue"})
        assert (spoofed.status, spoofed.error["param"]) == (403, "x-jserve-tenant")
        assert tenants_of(server) == ["red"]


async def test_only_an_admin_changes_state(tmp_path):
    async with running(auth_file=auth_file(tmp_path)) as server:
        async with AsyncClient(server.address, token=RED) as red, AsyncClient(server.address, token=ROOT) as root:
            assert (await red.model_info()).name == "fake-model" and await red.check_integrity() == []
            for call in (red.drain(), red.flush_cache(), red.abort("x")):
                with pytest.raises(RequestError, match="needs a token with the role admin") as caught:
                    await call
                assert caught.value.code is Code.PERMISSION_DENIED
            assert not server.state.is_draining
            assert await root.flush_cache() == 7 and await root.abort("x") is False
            await root.drain()
            assert server.state.is_draining


async def test_a_token_taken_out_of_the_file_is_refused_from_the_next_call_on(tmp_path):
    async with running(auth_file=auth_file(tmp_path)) as server:
        assert await code_of(server, token=RED) is None
        auth_file(tmp_path, tokens=entry(BLUE, "blue"))
        assert await code_of(server, token=RED) is Code.UNAUTHENTICATED
        assert await code_of(server, token=BLUE) is None


async def test_a_message_is_not_read_before_it_is_known_who_sends_it(tmp_path):
    async with running(auth_file=auth_file(tmp_path)) as server, grpc.aio.insecure_channel(server.address) as channel:
        call = channel.unary_unary("/jserve.v1.Inference/GenerateUnary")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"\xff no protobuf")
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


# Limits of tenants


async def test_a_tenant_at_its_limit_is_refused_and_the_others_are_not(tmp_path):
    engine, limits = FakeEngine(), "[tenant.red]\nmax_running = 1\nmax_waiting = 1\n"
    engine.go.clear()
    async with running(engine, auth_file=auth_file(tmp_path, limits)) as server:
        async with AsyncClient(server.address, token=RED) as red, AsyncClient(server.address, token=BLUE) as blue:
            asked = [asyncio.create_task(red.generate_unary(HELLO)) for _ in range(2)]
            await until(lambda: len(engine.running) == 1 and server.state.tenants.num_queued == 1)
            with pytest.raises(RequestError, match="max_running = 1 and max_waiting = 1") as caught:
                await red.generate_unary(HELLO)
            assert caught.value.code is Code.RESOURCE_EXHAUSTED and caught.value.retry_after_s == 1.0
            headers = {"Authorization": f"Bearer {RED}"}
            over_http = await post(server, "/v1/completions", {"prompt": "x"}, headers=headers)
            assert (over_http.status, over_http.headers["retry-after"]) == (429, "1")
            others = [asyncio.create_task(blue.generate_unary(HELLO)) for _ in range(5)]
            await until(lambda: len(engine.running) == 6)
            engine.go.set()
            await asyncio.gather(*asked, *others)
        await until(lambda: not server.state.tenants._tenants)


async def test_tokens_a_minute_are_counted_over_both_transports(tmp_path):
    limits = "[tenant.red]\ntokens_per_minute = 30\n"
    async with running(auth_file=auth_file(tmp_path, limits)) as server:
        async with AsyncClient(server.address, token=RED) as red:
            await red.generate_unary(GenerateRequest(prompt="p", sampling_params=SamplingParams(max_tokens=50)))
            with pytest.raises(RequestError, match="30 tokens a minute") as caught:
                await red.generate_unary(HELLO)
            assert caught.value.code is Code.RESOURCE_EXHAUSTED and 30 < caught.value.retry_after_s < 60
        async with openai_client(server, api_key=RED) as client:
            with pytest.raises(openai.RateLimitError) as limited:
                await client.completions.create(model="fake-model", prompt="x")
            assert 30 < int(limited.value.response.headers["retry-after"]) <= 60
        assert await code_of(server, token=BLUE) is None


async def test_a_drain_also_finishes_what_waits_for_its_tenants_turn(tmp_path):
    engine = FakeEngine(step_s=0.01)
    async with running(engine, auth_file=auth_file(tmp_path, "[default]\nmax_running = 1\n")) as server:
        async with AsyncClient(server.address, token=RED) as red:
            asked = [asyncio.create_task(red.generate_unary(HELLO)) for _ in range(3)]
            await until(lambda: server.state.tenants.num_queued == 2)
            server.begin_drain()
            assert await server.finish_drain() == 0
            assert [result.outputs[0].text for result in await asyncio.gather(*asked)] == [whole_text(2)] * 3
            with pytest.raises(RequestError, match="draining"):
                await red.generate_unary(HELLO)


async def test_a_cancelled_call_gives_its_place_back(tmp_path):
    engine = FakeEngine(step_s=0.005)
    async with running(engine, auth_file=auth_file(tmp_path, "[default]\nmax_running = 1\n")) as server:
        async with AsyncClient(server.address, token=RED) as red:
            running_one, waiting_one = (asyncio.create_task(red.generate_unary(ENDLESS)) for _ in range(2))
            await until(lambda: engine.running and server.state.tenants.num_queued == 1)
            for task in (waiting_one, running_one):
                task.cancel()
            await asyncio.gather(running_one, waiting_one, return_exceptions=True)
            assert (await red.generate_unary(HELLO)).outputs[0].text == whole_text(2)
        await until(lambda: not server.state.tenants._tenants)


# TLS


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


def tls_of(authority, **more) -> dict:
    cert, key = authority.issue("server")
    return {"tls_cert": cert, "tls_key": key, **more}


async def test_tls_serves_those_who_trust_the_authority(authority, tmp_path):
    other = Authority(tmp_path, "other")
    async with running(**tls_of(authority)) as server:
        assert server.http_url.startswith("https://")
        assert await code_of(server, tls=authority.client()) is None
        assert await code_of(server, tls=other.client()) is Code.UNAVAILABLE
        assert await code_of(server) is Code.UNAVAILABLE, "plaintext to a TLS port"
        answer = await post(server, "/v1/completions", {"prompt": "x"}, context=https_context(authority.client()))
        assert answer.status == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            await ask(server, "GET", "/health", context=https_context(other.client()))
        with pytest.raises(OSError):
            plain = type("Plain", (), {"http_url": server.http_url.replace("https", "http")})
            await ask(plain, "GET", "/health")
        assert tenants_of(server) == [None, None]


async def test_tls_and_tokens_together(authority, tmp_path):
    async with running(**tls_of(authority), auth_file=auth_file(tmp_path)) as server:
        assert await code_of(server, tls=authority.client()) is Code.UNAUTHENTICATED
        assert await code_of(server, tls=authority.client(), token=RED) is None
        assert tenants_of(server) == ["red"]


async def test_mutual_tls_lets_in_who_has_a_certificate_and_makes_its_name_the_tenant(authority, tmp_path):
    other = Authority(tmp_path, "other")
    async with running(**tls_of(authority), tls_client_ca=authority.path) as server:
        refused = {
            "none": authority.client(),
            "expired": authority.client("late", expired=True),
            "foreign": ClientTls(authority.path, *other.issue("red", file="foreign"), "localhost"),
        }
        for why, tls in refused.items():
            assert await code_of(server, tls=tls) is Code.UNAVAILABLE, why
            with pytest.raises(OSError):
                await ask(server, "GET", "/health", context=https_context(tls))
        good = authority.client("red")
        assert await code_of(server, tls=good) is None
        answer = await post(server, "/v1/completions", {"prompt": "x"}, context=https_context(good))
        assert answer.status == 200
        assert tenants_of(server) == ["red", "red"]
        in_a_mesh = authority.client("pod", uri="spiffe://mesh/red")
        assert await code_of(server, tls=in_a_mesh) is None
        await post(server, "/v1/completions", {"prompt": "x"}, context=https_context(in_a_mesh))
        assert tenants_of(server)[2:] == ["spiffe://mesh/red"] * 2


async def test_a_proxys_word_counts_and_nobody_elses(authority, tmp_path):
    settings = tls_of(authority, tls_client_ca=authority.path, auth_file=auth_file(tmp_path), trusted_proxies="edge")
    async with running(**settings) as server:
        async def tenant_by(name: str, metadata, headers) -> tuple:
            tls = authority.client(name)
            options = [("grpc.ssl_target_name_override", "localhost")]
            async with grpc.aio.secure_channel(server.address, tls.credentials(), options=options) as channel:
                try:
                    await inference_pb2_grpc.InferenceStub(channel).GenerateUnary(
                        pb.GenerateRequest(prompt="p"), metadata=metadata)
                    over_grpc = server.state.engine.requests[-1].tenant
                except grpc.aio.AioRpcError as error:
                    over_grpc = error.code().name
            answer = await post(server, "/v1/completions", {"prompt": "p"}, headers=headers, context=https_context(tls))
            return over_grpc, server.state.engine.requests[-1].tenant if answer.status == 200 else answer.status

        blue, red = ("x-jserve-tenant", "blue"), ("authorization", f"Bearer {RED}")
        assert await tenant_by("edge", [blue], dict([blue])) == ("blue", "blue")
        assert await tenant_by("edge", [red], dict([red])) == ("red", "red")
        assert await tenant_by("guest", [blue, red], dict([blue, red])) == ("PERMISSION_DENIED", 403)
        assert await tenant_by("guest", [blue], dict([blue])) == ("UNAUTHENTICATED", 401)


def serial_of(port: int, tls: ClientTls, protocol: str) -> int:
    context = https_context(tls)
    context.set_alpn_protocols([protocol])
    with socket.create_connection(("127.0.0.1", port)) as plain:
        with context.wrap_socket(plain, server_hostname="localhost") as connection:
            return int(connection.getpeercert()["serialNumber"], 16)


async def test_new_certificates_count_from_the_next_connection_on(authority, tmp_path):
    settings = tls_of(authority, tls_client_ca=authority.path)
    async with running(FakeEngine(step_s=0.005), **settings) as server:
        tls, http_port = authority.client("red"), int(server.http_url.rpartition(":")[2])

        async def serials() -> list[int]:
            return [await asyncio.to_thread(serial_of, port, tls, protocol)
                    for port, protocol in ((server.port, "h2"), (http_port, "http/1.1"))]

        async with AsyncClient(server.address, tls=tls) as client:
            stream = client.generate(ENDLESS)
            await anext(stream)
            before = await serials()
            authority.issue("server")
            after = await serials()
            assert before[0] == before[1] != after[0] == after[1]
            await anext(stream)
            await stream.aclose()
        # Another authority for clients too: yesterday's clients stay out, today's come in.
        successor = Authority(tmp_path, "successor")
        Path(authority.path).write_bytes(Path(successor.path).read_bytes())
        assert await code_of(server, tls=ClientTls(None, tls.cert, tls.key, "localhost")) is Code.UNAVAILABLE
        Path(settings["tls_key"]).write_text("half a key")
        server_ca = ssl.create_default_context()
        server_ca.check_hostname, server_ca.verify_mode = False, ssl.CERT_NONE
        server_ca.load_cert_chain(*successor.issue("red", file="red-of-successor"))
        answer = await post(server, "/v1/completions", {"prompt": "x", "max_tokens": 1}, context=server_ca)
        assert answer.status == 200, "a broken file keeps what was read before"


@pytest.mark.parametrize("section, message", [
    ({"tls_cert": "CERT"}, "server.tls_key: TLS needs both"),
    ({"tls_key": "KEY"}, "server.tls_cert: TLS needs both"),
    ({"tls_client_ca": "CA"}, "server.tls_client_ca: needs --tls-cert"),
    ({"tls_cert": "CERT", "tls_key": "/nowhere"}, "server.tls_key = '/nowhere': No such file"),
    ({"tls_cert": "CERT", "tls_key": "OTHER_KEY"}, "not a PEM certificate with its key .*KEY_VALUES_MISMATCH"),
    ({"tls_cert": "KEY", "tls_key": "KEY"}, "not a PEM certificate with its key"),
    ({"tls_cert": "CERT", "tls_key": "KEY", "tls_client_ca": "KEY"}, "tls_client_ca = .*: no PEM certificates"),
    ({"trusted_proxies": "edge"}, "give --tls-client-ca"),
    ({"auth_file": "/nowhere"}, "server.auth_file = '/nowhere': No such file"),
])
def test_settings_that_cannot_work_are_refused_at_start(authority, section, message):
    files = dict(zip(("CERT", "KEY"), authority.issue("server")), CA=authority.path)
    files["OTHER_KEY"] = authority.issue("other")[1]
    with pytest.raises(ConfigError, match=message):
        Server(config(**{name: files.get(value, value) for name, value in section.items()}))


# Hosts


async def test_another_host_needs_tls_or_tokens_or_insecure(authority, tmp_path):
    with pytest.raises(ConfigError, match="neither TLS nor a token file; .*--tls-cert .*--auth-file, or --insecure"):
        Server(config(host="0.0.0.0"))
    Server(config(host="0.0.0.0", **tls_of(authority)))
    Server(config(host="0.0.0.0", auth_file=auth_file(tmp_path)))
    Server(config(host="0.0.0.0", insecure=True))


@pytest.mark.parametrize("with_tls, with_tokens, warned", [
    (False, False, ["anybody who reaches 0.0.0.0 may call"]), (True, False, ["anybody who reaches 0.0.0.0 may call"]),
    (False, True, ["there is no TLS"]), (True, True, [])])
async def test_what_is_open_to_others_is_said_at_start(authority, tmp_path, caplog, with_tls, with_tokens, warned):
    section = {"host": "0.0.0.0", "insecure": not (with_tls or with_tokens)}
    section |= (tls_of(authority) if with_tls else {}) | ({"auth_file": auth_file(tmp_path)} if with_tokens else {})
    async with running(**section):
        said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == len(warned) and all(text in line for text, line in zip(warned, said))


# Logs


async def test_no_log_and_no_answer_tells_a_secret(tmp_path, caplog):
    engine = FakeEngine()
    engine.failures[SECRET + "!"] = (0, RuntimeError("boom"))
    path = auth_file(tmp_path)
    digests = [line.split('"')[1] for line in Path(path).read_text().splitlines() if line.startswith("sha256")]
    with caplog.at_level(logging.DEBUG):
        async with running(engine, auth_file=path) as server:
            async with AsyncClient(server.address, token=RED) as red:
                await red.generate_unary(HELLO)
                with pytest.raises(RequestError) as failed:
                    await red.generate_unary(GenerateRequest(prompt=SECRET + "!"))
                info = (await red.server_info()).config_json
            answers = [str(failed.value), info]
            for token in (RED, "wrong-token-xyz"):
                for body in ({"prompt": SECRET}, {"prompt": SECRET + "!"}, {"messages": SECRET}):
                    answer = await post(server, "/v1/completions", body, headers={"Authorization": f"Bearer {token}"})
                    answers.append(answer.body.decode() if "messages" not in body else "")
            auth_file(tmp_path, tokens="[[token]")
            await post(server, "/v1/completions", {"prompt": SECRET}, headers={"Authorization": f"Bearer {RED}"})
    assert "boom" in caplog.text, "the failure itself is logged"
    for secret in (SECRET, RED, BLUE, ROOT, "wrong-token-xyz", *digests):
        assert secret not in caplog.text
        assert not any(secret in answer for answer in answers)
