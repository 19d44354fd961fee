"""Turns a service of jserve.v1 and an object with its methods into gRPC handlers.

What every method shares is here: requests that cannot be read, RequestError -> status, an unexpected exception ->
INTERNAL for that one call, and UNIMPLEMENTED by name for methods that the object lacks.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from jserve.request import Code, RequestError
from jserve.server.decode import decoder
from jserve.server.errors import abort

log = logging.getLogger(__name__)


def service_handler(service: ServiceDescriptor, implementation: object) -> grpc.GenericRpcHandler:
    """`implementation` has a coroutine method (request, context) for each method that is built.

    A unary method returns its response; a streaming one writes to the context.
    """
    handlers = {method.name: _method_handler(method, getattr(implementation, method.name, None))
                for method in service.methods}
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _method_handler(method: MethodDescriptor, function: Callable | None) -> grpc.RpcMethodHandler:
    make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
    if function is None:
        return make(_not_built(method))
    return make(
        _guarded(method, function),
        request_deserializer=decoder(method.input_type),
        response_serializer=lambda response: response.SerializeToString(),
    )


def _not_built(method: MethodDescriptor) -> Callable[[bytes, grpc.aio.ServicerContext], Awaitable[None]]:
    error = RequestError(Code.UNIMPLEMENTED, f"{method.full_name} is not built yet")

    async def refuse(_: bytes, context: grpc.aio.ServicerContext) -> None:
        await abort(context, error)

    return refuse


def _guarded(method: MethodDescriptor, function: Callable) -> Callable[[Any, grpc.aio.ServicerContext], Awaitable]:
    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            if isinstance(request, RequestError):
                raise request
            return await function(request, context)
        except RequestError as error:
            failure = error
        except Exception as error:
            if context.cancelled() or context.done():
                raise  # the client has left; gRPC drops it
            request_id = getattr(request, "request_id", "")
            log.exception("%s failed, request_id=%r", method.full_name, request_id)
            named = f" in request {request_id}" if request_id else ""
            failure = RequestError(Code.INTERNAL, f"internal error{named}: {type(error).__name__}; the log has more")
        await abort(context, failure)

    return call
