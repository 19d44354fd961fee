"""The HTTP routes: who may ask, what is asked, and an answer or an error in OpenAI's form.

One `ServerState` stands behind gRPC and HTTP, so both see the same engine, the same limits and the same drain.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jserve.access.certificates import names_in
from jserve.access.gate import TENANT_HEADER, Caller, Credentials
from jserve.http import chat, completions, embeddings, tokens
from jserve.http.body import Fields, read_fields
from jserve.http.errors import HttpRefusal, refusal
from jserve.http.event_stream import EventStream
from jserve.http.run import while_connected
from jserve.request import Code, RequestError
from jserve.server.state import ServerState

log = logging.getLogger(__name__)

PEER_CERTIFICATE = "peer_certificate"
"""Where in a request's state the connection's client certificate is, as Python's ssl gives it."""

Handler = Callable[[ServerState, Request, Caller], Awaitable[Response]]


def make_app(state: ServerState) -> Starlette:
    """The ASGI application over a server's state."""

    def route(path: str, handler: Handler, method: str) -> Route:
        return Route(path, _guarded(state, handler), methods=[method])

    return Starlette(
        routes=[
            Route("/health", _health(state)),  # open to everybody
            route("/metrics", _metrics, "GET"),
            route("/v1/models", _models, "GET"),
            route("/v1/models/{name:path}", _model, "GET"),
            route("/v1/completions", _completions, "POST"),
            route("/v1/chat/completions", _chat_completions, "POST"),
            route("/v1/embeddings", _embeddings, "POST"),
            route("/tokenizer_info", _tokenizer_info, "GET"),
            route("/tokenize", _tokenize, "POST"),
            route("/detokenize", _detokenize, "POST"),
        ],
        exception_handlers={HTTPException: _no_such_route},
    )


def _guarded(state: ServerState, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return await handler(state, request, _caller(state, request))
        except (RequestError, HttpRefusal) as error:
            return refusal(error, request.state.fields.spelled if hasattr(request.state, "fields") else {})
        except Exception as error:
            log.exception("%s %s failed", request.method, request.url.path)
            return refusal(
                RequestError(Code.INTERNAL, f"internal error: {type(error).__name__}; the log has more"))

    return endpoint


def _caller(state: ServerState, request: Request) -> Caller:
    return state.gate.caller(Credentials(
        authorization=request.headers.getlist("authorization"),
        tenant=request.headers.getlist(TENANT_HEADER),
        certificate_names=names_in(request.scope["state"].get(PEER_CERTIFICATE)),
    ))


async def _no_such_route(request: Request, error: HTTPException) -> Response:
    response = refusal(HttpRefusal(error.status_code, f"{request.method} {request.url.path[:200]}: {error.detail}"))
    response.headers.update(error.headers or {})
    return response


def _health(state: ServerState) -> Callable[[Request], Awaitable[Response]]:
    """200 where new requests are welcome."""

    async def endpoint(_: Request) -> Response:
        return JSONResponse({"status": state.name}, 200 if state.name == "ready" else 503)

    return endpoint


async def _metrics(state: ServerState, _: Request, caller: Caller) -> Response:
    page = generate_latest(state.engine_when_ready().metrics_registry)
    return Response(page, media_type=CONTENT_TYPE_LATEST)


async def _models(state: ServerState, _: Request, caller: Caller) -> Response:
    return JSONResponse({"object": "list", "data": [_model_card(state)]})


async def _model(state: ServerState, request: Request, caller: Caller) -> Response:
    card, name = _model_card(state), request.path_params["name"]
    if name != card["id"]:
        raise RequestError(Code.NOT_FOUND, f"model = {name[:100]!r}: this server has {card['id']!r}", field="model")
    return JSONResponse(card)


def _model_card(state: ServerState) -> dict:
    info = state.engine_when_ready().info
    started = int(time.time() - (time.monotonic() - state.started))
    return {"id": info.name, "object": "model", "created": started, "owned_by": "jserve", "root": info.path,
            "max_model_len": info.context_length}


async def _completions(state: ServerState, request: Request, caller: Caller) -> Response:
    info = state.engine_for_requests().info
    call = await completions.read_call(await _fields(state, request), info, _new_id("cmpl"))
    return await _answer(state, request, caller, call, completions)


async def _chat_completions(state: ServerState, request: Request, caller: Caller) -> Response:
    info = state.engine_for_requests().info
    call = chat.read_call(await _fields(state, request), info, _new_id("chatcmpl"))
    return await _answer(state, request, caller, call, chat)


async def _answer(state: ServerState, request: Request, caller: Caller, call, endpoint) -> Response:
    """`endpoint` is the module `completions` or `chat`."""
    if not call.delivery.stream:
        body = await while_connected(request, endpoint.answer(state, caller, call))
        return await asyncio.to_thread(JSONResponse, body)  # thousands of logprobs take a while
    pieces = endpoint.chunks(state, caller, call)
    try:
        first = await while_connected(request, anext(pieces))
    except BaseException:
        await pieces.aclose()
        raise
    return EventStream(first, pieces)


async def _embeddings(state: ServerState, request: Request, caller: Caller) -> Response:
    info = state.engine_for_requests().info
    call = embeddings.read_call(await _fields(state, request), info, _new_id("embd"))
    body = await while_connected(request, embeddings.answer(state, caller, call))
    return await asyncio.to_thread(JSONResponse, body)  # a million numbers take a while


async def _tokenizer_info(state: ServerState, _: Request, caller: Caller) -> Response:
    return JSONResponse(tokens.tokenizer_info(state.engine_when_ready().info))


async def _tokenize(state: ServerState, request: Request, caller: Caller) -> Response:
    return JSONResponse(await tokens.tokenize(state, await _fields(state, request)))


async def _detokenize(state: ServerState, request: Request, caller: Caller) -> Response:
    return JSONResponse(await tokens.detokenize(state, await _fields(state, request)))


async def _fields(state: ServerState, request: Request) -> Fields:
    request.state.fields = await read_fields(request, state.config.server.max_message_bytes)
    return request.state.fields


def _new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"
