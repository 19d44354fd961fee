"""The HTTP front for tests: the official client of it, and plain requests where that would not send such a thing."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import ssl
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

import openai

from jserve.server.app import Server
from tests.support.grpc_server import serving


@contextlib.asynccontextmanager
async def http_serving(engine, **server_section) -> AsyncIterator[tuple[Server, openai.AsyncOpenAI]]:
    """A server with HTTP beside gRPC, and the official client of it, which does not try again by itself."""
    async with serving(engine, http_port=0, **server_section) as (server, _):
        async with openai_client(server) as client:
            yield server, client


def openai_client(server: Server, api_key: str = "any") -> openai.AsyncOpenAI:
    # Reading the certificates of the world takes half a second a client; nothing here is signed by them.
    transport = openai.DefaultAsyncHttpxClient(verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    return openai.AsyncOpenAI(
        base_url=f"{server.http_url}/v1", api_key=api_key, max_retries=0, http_client=transport)


_CLIENTS = ThreadPoolExecutor(20, "http-client")
"""Not the loop's own threads: those the server needs to answer."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self) -> dict:
        return self.json["error"]


async def ask(
    server: Server, method: str, path: str, body: object = None, *, headers: dict | None = None,
    context: ssl.SSLContext | None = None,
) -> Answer:
    """One request on a connection of its own.  `body`: bytes as they are, anything else as JSON."""
    asking = partial(_ask, server.http_url, method, path, body, headers or {}, context)
    return await asyncio.get_running_loop().run_in_executor(_CLIENTS, asking)


async def post(server: Server, path: str, body: object, **more) -> Answer:
    return await ask(server, "POST", path, body, **more)


def events(answer: Answer) -> list:
    """The objects of an event stream; the string "[DONE]" as itself."""
    texts = [line.removeprefix("data: ") for line in answer.body.decode().split("\n\n") if line]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


LIMIT_S = 120
"""Of a request; only for a server that hangs, as whole machines stand still now and then."""


def _ask(url: str, method: str, path: str, body: object, headers: dict, context: ssl.SSLContext | None) -> Answer:
    address = urlsplit(url)
    if address.scheme == "https":
        connection = http.client.HTTPSConnection(address.hostname, address.port, timeout=LIMIT_S, context=context)
    else:
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=LIMIT_S)
    with contextlib.closing(connection):
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        if body is not None:
            headers = {"Content-Type": "application/json", **headers}
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return Answer(response.status, {key.lower(): value for key, value in response.getheaders()}, response.read())
