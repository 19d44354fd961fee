"""Fields that /v1/completions and /v1/chat/completions share -> GenerateRequest.

Checks only what JSON can get wrong by itself; whether values make sense is the engine's validator's business.  Beside
OpenAI's fields, every field of SamplingParams may be given by its own name (top_k, min_p, seed, regex, ...).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from jserve.http.body import Fields
from jserve.request import Code, EarlyStopping, RequestError, SamplingParams, invalid

_SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))
_LABELS = ("user", "safety_identifier", "prompt_cache_key")
"""Names for the client's own books, and a hint for caches: by OpenAI's definition they ask nothing of the answer."""


@dataclass(frozen=True)
class Delivery:
    """How the answer travels."""

    stream: bool
    include_usage: bool
    return_token_ids: bool = False
    """Each choice, and each piece of one, tells its token ids, as vLLM's does."""


def take_model(fields: Fields, served_name: str) -> None:
    """NOT_FOUND where another model than the served one is asked for; unset is the served one."""
    model = fields.take("model", str, default=served_name)
    if model != served_name:
        raise RequestError(Code.NOT_FOUND, f"model = {model[:100]!r}: this server has {served_name!r}", field="model")


def take_delivery(fields: Fields) -> Delivery:
    stream = fields.take("stream", bool, default=False)
    return_token_ids = fields.take("return_token_ids", bool, default=False)
    options = fields.take_object("stream_options")
    if options is None:
        return Delivery(stream, False, return_token_ids)
    if not stream:
        raise RequestError(Code.INVALID_ARGUMENT, "stream_options: has no meaning without stream = true",
                           field="stream_options")
    include_usage = options.take("include_usage", bool, default=False)
    options.take_neutral("include_obfuscation", False)
    options.finish()
    return Delivery(stream, include_usage, return_token_ids)


def take_request_fields(fields: Fields) -> dict[str, Any]:
    """Fields of GenerateRequest itself, by its names."""
    for name in _LABELS:
        fields.take(name, str)
    if (metadata := fields.take_object("metadata")) is not None:  # labels too
        metadata.take_rest(str)
    fields.take_neutral("store", False)
    fields.take_neutral("prompt_cache_retention", "in_memory", "in-memory")
    fields.take_neutral("service_tier", "auto", "default")
    return {
        "request_id": fields.take("request_id", str),
        "priority": fields.take("priority", int),
        "cache_salt": fields.take("cache_salt", str),
        "bypass_prefix_cache": fields.take("bypass_prefix_cache", bool),
    }


def name_of(of_request: dict[str, Any], call_id: str) -> str:
    """Takes the request's id out of its fields; the call's own where the client gave none."""
    name = of_request.pop("request_id")
    return call_id if name is None else name  # an empty one is the validator's to refuse


def take_sampling(fields: Fields, besides: Collection[str] = ()) -> dict[str, Any]:
    """Fields of SamplingParams that are set, but for those `besides`, which the endpoint reads itself."""
    values = {}
    for name in _SAMPLING_FIELDS:
        if name not in besides and (value := fields.take(name)) is not None:
            values[name] = value
    if isinstance(values.get("early_stopping"), str):
        values["early_stopping"] = _early_stopping(values["early_stopping"])
    if "logit_bias" in values:
        values["logit_bias"] = _logit_bias(values["logit_bias"])
    chosen = _take_response_format(fields)
    for name in chosen.keys() & values.keys():
        raise invalid(name, values[name], f"{fields.spelled[name]} says it too; set one of them")
    return values | chosen


def _take_response_format(fields: Fields) -> dict[str, Any]:
    chosen = fields.take_object("response_format")
    if chosen is None:
        return {}
    kind = chosen.take("type", str)
    values: dict[str, Any] = {}
    if kind == "json_object":
        values["json_object"] = True
        fields.spelled["json_object"] = "response_format.type"
    elif kind == "json_schema":
        named = chosen.take_object("json_schema") or Fields({})
        schema = named.take("schema", dict)
        if schema is None:
            raise RequestError(Code.INVALID_ARGUMENT, "response_format.json_schema.schema: must be set",
                               field="response_format.json_schema.schema")
        for label in ("name", "description"):
            named.take(label, str)
        named.take("strict", bool)  # the schema is always kept to
        named.finish()
        values["json_schema"] = json.dumps(schema)
        fields.spelled["json_schema"] = "response_format.json_schema.schema"
    elif kind != "text":
        raise invalid("response_format.type", kind, "must be text, json_object or json_schema")
    chosen.finish()
    return values


def _early_stopping(name: str) -> EarlyStopping | str:
    try:
        return EarlyStopping(name.lower())
    except ValueError:
        return name  # the validator says what it may be


def _logit_bias(value: object) -> dict[int, Any]:
    if not isinstance(value, dict):
        raise invalid("logit_bias", value, f"must be an object of token id to bias, not {type(value).__name__}")
    biases = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 20):
            raise invalid("logit_bias", key, "keys must be token ids")
        biases[int(key)] = bias
    if len(biases) < len(value):
        raise invalid("logit_bias", list(value), "a token id is there twice")
    return biases
