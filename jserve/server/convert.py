"""Requests: protos of jserve.v1 <-> the dataclasses of jserve.request, both directions (results: convert_results).

Checks only what a proto can get wrong by itself (an enum value that is not in it); whether values make sense is the
validator's business.  Used by the server, its client and `jserve batch`; knows no gRPC.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jserve.proto_gen import inference_pb2 as pb
from jserve.proto_gen import sampling_pb2
from jserve.request import Code, EarlyStopping, GenerateRequest, Message, RequestError, SamplingParams, invalid
from jserve.sampling.fields import refuse_empty

_MESSAGE_SCALARS = ("role", "content", "name", "tool_call_id")
_REQUEST_SCALARS = ("request_id", "prompt", "lora_name", "priority", "cache_salt", "bypass_prefix_cache")


def request_from_proto(message: pb.GenerateRequest, deadline: float | None = None) -> GenerateRequest:
    """`deadline` is the call's, in `time.monotonic()` seconds; `stream` is the transport's, see `stream_interval`."""
    return GenerateRequest(
        **{name: getattr(message, name) for name in _REQUEST_SCALARS if message.HasField(name)},
        prompt_token_ids=list(message.prompt_token_ids) or None,
        messages=messages_from_proto(message.messages) or None,
        tools=tools_from_proto(message.tools),
        sampling_params=sampling_params_from_proto(message.sampling_params),
        deadline=deadline,
    )


def request_to_proto(request: GenerateRequest, stream_interval: int | None = None) -> pb.GenerateRequest:
    """What a client sends; the deadline travels as gRPC's own and the tenant never comes from a client."""
    for name in ("prompt_token_ids", "messages"):
        if getattr(request, name) is not None and not len(getattr(request, name)):
            raise invalid(name, [], "must not be empty")  # the proto has no way to say it
    message = pb.GenerateRequest(messages=messages_to_proto(request.messages or ()))
    for name in _REQUEST_SCALARS:
        set_field(message, name, getattr(request, name))
    set_field(message, "prompt_token_ids", request.prompt_token_ids)
    set_field(message, "tools", tools_to_proto(request.tools))
    params = sampling_params_to_proto(request.sampling_params)
    if params.ListFields():
        message.sampling_params.CopyFrom(params)
    if stream_interval is not None:
        set_field(message.stream, "interval", stream_interval, "stream.")
    return message


def stream_interval(message: pb.GenerateRequest) -> int:
    """Tokens a message of the stream should carry."""
    interval = message.stream.interval if message.stream.HasField("interval") else 1
    if interval < 1:
        raise invalid("stream.interval", interval, "must be 1 or larger")
    return interval


def messages_from_proto(messages: Sequence[pb.Message]) -> list[Message]:
    for index, message in enumerate(messages):
        for name in ("role", "content"):
            if not message.HasField(name):
                raise RequestError(Code.INVALID_ARGUMENT, f"messages[{index}].{name} is not set",
                                   field=f"messages[{index}].{name}")
    return [
        Message(
            **{name: getattr(message, name) for name in _MESSAGE_SCALARS if message.HasField(name)},
            tool_calls=_json_objects(message.tool_calls, f"messages[{index}].tool_calls"),
        )
        for index, message in enumerate(messages)
    ]


def tools_from_proto(texts: Sequence[str]) -> list[dict] | None:
    return _json_objects(texts, "tools")


def tools_to_proto(tools: Iterable[Mapping] | None) -> list[str] | None:
    return _json_texts(tools)


def messages_to_proto(messages: Iterable[Message]) -> list[pb.Message]:
    result = []
    for index, message in enumerate(messages):
        result.append(pb.Message())
        for name in _MESSAGE_SCALARS:
            set_field(result[-1], name, getattr(message, name), f"messages[{index}].")
        set_field(result[-1], "tool_calls", _json_texts(message.tool_calls), f"messages[{index}].")
    return result


def sampling_params_from_proto(message: sampling_pb2.SamplingParams) -> SamplingParams:
    values: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.name == "early_stopping":
            value = _early_stopping(value)
        elif field.name == "logit_bias":
            value = dict(value)
        elif field.is_repeated:
            value = list(value)
        values[field.name] = value
    return SamplingParams(**values)


def sampling_params_to_proto(params: SamplingParams) -> sampling_pb2.SamplingParams:
    message = sampling_pb2.SamplingParams()
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if isinstance(value, EarlyStopping):
            value = sampling_pb2.EarlyStopping.Value(value.name)
        refuse_empty(field.name, value, f"sampling_params.{field.name}")
        set_field(message, field.name, value, "sampling_params.")
    return message


def set_field(message, name: str, value: Any, path: str = "") -> None:
    """Sets a field; None and empty collections stay unset; what the field's type cannot hold is refused by name."""
    if value is None:
        return
    try:
        field = message.DESCRIPTOR.fields_by_name[name]
        if name == "logit_bias":
            getattr(message, name).update(value)
        elif field.is_repeated:
            getattr(message, name).extend([value] if isinstance(value, str) else value)
        else:
            setattr(message, name, value)
    except (TypeError, ValueError) as error:
        raise invalid(path + name, value, str(error)) from None


def _json_objects(texts: Sequence[str], path: str) -> list[dict] | None:
    """The objects that the texts spell; None where there are no texts."""
    objects = []
    for index, text in enumerate(texts):
        try:
            objects.append(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise invalid(f"{path}[{index}]", text, f"must be a JSON object: {error}") from None
        if not isinstance(objects[-1], dict):
            raise invalid(f"{path}[{index}]", text, "must be a JSON object")
    return objects or None


def _json_texts(objects: Iterable[Mapping] | None) -> list[str] | None:
    return None if objects is None else [json.dumps(item) for item in objects]


def _early_stopping(value: int) -> EarlyStopping | None:
    if value == sampling_pb2.EARLY_STOPPING_UNSPECIFIED:
        return None
    try:
        return EarlyStopping[sampling_pb2.EarlyStopping.Name(value)]
    except ValueError:
        known = ", ".join(item.name for item in EarlyStopping)
        raise invalid("sampling_params.early_stopping", value, f"must be one of {known}") from None
