"""RequestError -> HTTP status and a body in OpenAI's form; no other shape of error ever leaves the HTTP server."""

from __future__ import annotations

import math
from collections.abc import Mapping

from starlette.responses import JSONResponse

from jserve.request import Code, RequestError

STATUS = {
    Code.INVALID_ARGUMENT: 400,
    Code.FAILED_PRECONDITION: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.ABORTED: 409,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.CANCELLED: 499,
    Code.INTERNAL: 500,
    Code.UNIMPLEMENTED: 501,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
}

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    499: "cancelled",
}
_OPENAI_NAMES = {"sampling_params.": "", "prompt_token_ids": "prompt"}
"""How our fields are called here, in a field's path and in what is said about it."""


class HttpRefusal(Exception):
    """A request that HTTP itself gets wrong, with a status that no Code stands for."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status
        self.message = message


def refusal(error: RequestError | HttpRefusal, spelled: Mapping[str, str] = {}) -> JSONResponse:
    """The answer to a request that was refused before its answer began.

    Args:
      spelled: fields of SamplingParams that the body set by names of OpenAI's.
    """
    headers = {}
    status = error.status if isinstance(error, HttpRefusal) else STATUS[error.code]
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, RequestError) and error.retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    return JSONResponse(error_body(error, spelled), status, headers)


def error_body(error: RequestError | HttpRefusal, spelled: Mapping[str, str] = {}) -> dict:
    """`{"error": {message, type, param, code}}`; also an event of a stream that breaks."""
    if isinstance(error, HttpRefusal):
        return _body(error.message, error.status, None, None)
    param = None if error.field is None else _in_openai_names(error.field, spelled)
    code = "model_not_found" if error.code is Code.NOT_FOUND and param == "model" else error.code.value.lower()
    return _body(_in_openai_names(error.message, spelled), STATUS[error.code], param, code)


def _in_openai_names(text: str, spelled: Mapping[str, str]) -> str:
    names = {f"sampling_params.{ours}": theirs for ours, theirs in spelled.items()} | _OPENAI_NAMES
    for ours, theirs in names.items():
        text = text.replace(ours, theirs)
    return text


def _body(message: str, status: int, param: str | None, code: str | None) -> dict:
    kind = _TYPES.get(status) or ("server_error" if status >= 500 else "invalid_request_error")
    message = message.encode(errors="replace").decode()  # a lone surrogate that a client sent would break the JSON
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
