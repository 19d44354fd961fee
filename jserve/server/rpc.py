"""Turns a service of jserve.v1 and an object with its methods into gRPC handlers.

What every method shares is here: requests that cannot be read, RequestError -> status, an unexpected exception ->
INTERNAL for that one call, and UNIMPLEMENTED by name for methods that the object lacks.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from jserve.access.gate import Gate, require_admin
from jserve.request import Code, RequestError
from jserve.server.callers import caller_of
from jserve.server.decode import decoder
from jserve.server.errors import abort

log = logging.getLogger(__name__)

Enter = Callable[[grpc.aio.ServicerContext], None]
"""Raises RequestError where this caller may not call this method."""


def service_handler(
    service: ServiceDescriptor, implementation: object, gate: Gate, admin_methods: Collection[str] = ()
) -> grpc.GenericRpcHandler:
    """`implementation` has a coroutine method (request, context) for each method that is built.

    A unary method returns its response; a streaming one writes to the context.  None is reached by callers whom the
    gate does not let in, nor `admin_methods` by those who are no admins.
    """
    handlers = {}
    for method in service.methods:
        enter = _entrance(method, gate, needs_admin=method.name in admin_methods)
        handlers[method.name] = _method_handler(method, getattr(implementation, method.name, None), enter)
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _entrance(method: MethodDescriptor, gate: Gate, needs_admin: bool) -> Enter:
    def enter(context: grpc.aio.ServicerContext) -> None:
        caller = caller_of(gate, context)
        if needs_admin:
            require_admin(caller, method.full_name)

    return enter


def _method_handler(method: MethodDescriptor, function: Callable | None, enter: Enter) -> grpc.RpcMethodHandler:
    make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
    if function is None:
        function, read = _not_built(method), lambda data: data
    else:
        read = decoder(method.input_type)
    return make(
        _guarded(method, function, enter, read),
        response_serializer=lambda response: response.SerializeToString(),
    )


def _not_built(method: MethodDescriptor) -> Callable[[bytes, grpc.aio.ServicerContext], Awaitable[None]]:
    error = RequestError(Code.UNIMPLEMENTED, f"{method.full_name} is not built yet")

    async def refuse(_: bytes, context: grpc.aio.ServicerContext) -> None:
        raise error

    return refuse


def _guarded(
    method: MethodDescriptor, function: Callable, enter: Enter, read: Callable[[bytes], Any]
) -> Callable[[bytes, grpc.aio.ServicerContext], Awaitable]:
    async def call(data: bytes, context: grpc.aio.ServicerContext) -> Any:
        request = None
        try:
            enter(context)
            request = read(data)  # not before it is known who asks
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
