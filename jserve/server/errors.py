"""RequestError <-> gRPC status with google.rpc details (BadRequest, RetryInfo), for the server and for its client.

Codes have the same names on both sides.  Everything is cut to what fits into HTTP/2 trailers (8 KiB, escapes included).
"""

from __future__ import annotations

import datetime

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from jserve.request import Code, RequestError

MAX_MESSAGE_BYTES = 1000
MAX_FIELD_BYTES = 200
DETAILS_KEY = "grpc-status-details-bin"


def to_status(error: RequestError) -> grpc.Status:
    """The gRPC status of an error: code, message and details in the trailing metadata."""
    message = _cut(error.message, MAX_MESSAGE_BYTES)
    status = status_pb2.Status(code=code_pb2.Code.Value(error.code.name), message=message)
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(error.field, MAX_FIELD_BYTES), description=message)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromTimedelta(datetime.timedelta(seconds=error.retry_after_s))
        status.details.add().Pack(retry)
    return rpc_status.to_status(status)


async def abort(context: grpc.aio.ServicerContext, error: RequestError) -> None:
    """Ends the call with the error's status; always raises."""
    status = to_status(error)
    await context.abort(status.code, status.details, status.trailing_metadata)


def from_rpc_error(error: grpc.RpcError) -> RequestError:
    """The RequestError that the server raised; also for errors of the transport, which carry no details."""
    try:
        code = Code[error.code().name]
    except KeyError:  # UNKNOWN, DATA_LOSS, OUT_OF_RANGE: never sent by jserve itself
        code = Code.INTERNAL
    field, retry_after_s = None, None
    for detail in _details(error):
        if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad_request = error_details_pb2.BadRequest()
            detail.Unpack(bad_request)
            field = bad_request.field_violations[0].field if bad_request.field_violations else None
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
    return RequestError(code, error.details() or code.name, field=field, retry_after_s=retry_after_s)


def _details(error: grpc.RpcError) -> list:
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            return list(status_pb2.Status.FromString(value).details)
    return []


def _cut(text: str, max_bytes: int) -> str:
    """At most max_bytes of UTF-8, never half a character; what UTF-8 cannot encode becomes `?`."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= max_bytes:
        return encoded.decode()
    return encoded[: max_bytes - 3].decode(errors="ignore") + "..."
