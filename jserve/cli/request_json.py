"""One line of proto JSON (snake_case or camelCase) to a GenerateRequest, or the RequestError that names the field."""

from __future__ import annotations

import json
import re

from google.protobuf import json_format

from jserve.proto_gen import inference_pb2, sampling_pb2
from jserve.request import Code, GenerateRequest, RequestError, invalid
from jserve.sampling.fields import FIELDS, refuse_empty
from jserve.server.convert import request_from_proto
from jserve.strict_json import without_duplicates

_AT = re.compile(r'(.*?) at "?GenerateRequest\.?([\w.\[\]]*)"?\W*$', re.DOTALL)
_NESTED = re.compile(r"Failed to parse (\w+) field: ")
_NOT_AN_INTEGER = re.compile(r"invalid literal for int\(\) with base 10: ('.*')")
_UNKNOWN = re.compile(r'has no field named "([^"]*)"')


def json_fields(line: bytes) -> dict[str, object]:
    """The object that the line spells.  A key given twice is refused: one of the values would be ignored."""
    try:
        fields = json.loads(line, object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise RequestError(Code.INVALID_ARGUMENT, f"not a line of JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError(Code.INVALID_ARGUMENT, f"expected a JSON object, got {line[:60].decode(errors='replace')}")
    return fields


def request_id_of(fields: dict[str, object]) -> str | None:
    for name in ("request_id", "requestId"):
        if isinstance(fields.get(name), str):
            return fields[name]
    return None


def request_from_fields(fields: dict[str, object]) -> GenerateRequest:
    """The request without its id: in a file ids only label results, so equal ones may run at the same time."""
    message = inference_pb2.GenerateRequest()
    try:
        json_format.ParseDict(fields, message)
    except (json_format.ParseError, RecursionError) as error:
        raise _refused(str(error)) from None
    if message.HasField("stream"):
        raise RequestError(Code.INVALID_ARGUMENT, "stream is set: results of a batch come whole", field="stream")
    message.ClearField("request_id")
    _refuse_empty_lists(fields)
    return request_from_proto(message)


def _refuse_empty_lists(fields: dict[str, object]) -> None:
    """A proto cannot tell an empty list from none; where that would change what is asked, the line is refused."""
    for name in ("prompt_token_ids", "messages"):
        if _given(fields, name) == []:
            raise invalid(name, [], "must not be empty")
    for name in FIELDS:
        refuse_empty(name, _given(_given(fields, "sampling_params") or {}, name), f"sampling_params.{name}")


def _given(fields: dict[str, object], name: str) -> object:
    """The value of a key in either spelling."""
    camel = re.sub(r"_(.)", lambda match: match[1].upper(), name)
    return fields.get(name, fields.get(camel))


def _refused(reason: str) -> RequestError:
    """protobuf's reason, shortened, with the path of the field in our own spelling."""
    reason = reason.split("\n")[0]
    nested = _NESTED.findall(reason)
    if nested and nested[0] in sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name:
        nested.insert(0, "sampling_params")  # protobuf leaves out where the message lies
    reason = _NESTED.sub("", reason).rstrip(".")
    reason = _NOT_AN_INTEGER.sub(r"\1 is not an integer", reason)
    at = _AT.match(reason)
    reason, path = at.groups() if at else (reason, ".".join(nested))
    if unknown := _UNKNOWN.search(reason):
        path = f"{path}.{unknown[1]}" if path else unknown[1]
        return RequestError(Code.INVALID_ARGUMENT, f"{_snake(path)}: unknown field", field=_snake(path))
    path = _snake(path)
    return RequestError(Code.INVALID_ARGUMENT, f"{path}: {reason}" if path else reason, field=path or None)


def _snake(path: str) -> str:
    return re.sub(r"(?<=[a-z0-9])([A-Z])", lambda match: "_" + match[1].lower(), path)
