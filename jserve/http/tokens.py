"""/tokenize and /detokenize: the same answers as the RPCs of those names, with vLLM's keys; /tokenizer_info.

An evaluation harness that finds the three asks the server for token ids and needs no tokenizer of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from jserve.engine.info import ModelInfo
from jserve.http import fields as common
from jserve.http.body import Fields
from jserve.http.chat import take_messages, take_tools
from jserve.proto_gen import inference_pb2 as pb
from jserve.request import Code, RequestError
from jserve.sampling.fields import integer, text
from jserve.server import convert
from jserve.server.inference_service import InferenceService
from jserve.server.state import ServerState

_TOKEN_ID = integer(-(2**63), 2**63 - 1)
"""Only what an int64 holds; the RPC says which ids there are."""


def tokenizer_info(info: ModelInfo) -> dict:
    tokenizer = info.tokenizer
    bos, eos = info.bos_token_id, next(iter(info.eos_token_ids), None)
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "model_max_length": info.context_length,
        "bos_token": None if bos is None else tokenizer.token_text(bos),
        "eos_token": None if eos is None else tokenizer.token_text(eos),
        "chat_template": getattr(tokenizer.chat_template, "source", None),
    }


async def tokenize(state: ServerState, fields: Fields) -> dict:
    common.take_model(fields, state.engine_when_ready().info.name)
    request = pb.TokenizeRequest()
    if "messages" in fields:
        messages = take_messages(fields)
        for index, message in enumerate(messages):
            _refuse_bad_unicode(f"messages[{index}].content", message.content)
        request.messages.extend(convert.messages_to_proto(messages))
    convert.set_field(request, "tools", convert.tools_to_proto(take_tools(fields)))
    prompt = fields.take("prompt", str)
    _refuse_bad_unicode("prompt", prompt)
    convert.set_field(request, "prompt", prompt)
    for name in ("add_special_tokens", "add_generation_prompt", "return_token_strs", "return_offsets"):
        convert.set_field(request, name, fields.take(name, bool))
    fields.finish()
    response = await InferenceService(state).Tokenize(request, None)
    answer = {"count": response.count, "max_model_len": response.max_model_len, "tokens": list(response.token_ids)}
    if request.return_token_strs:
        answer["token_strs"] = list(response.token_strs)
    if request.return_offsets:
        answer["offsets"] = _pairs(response.offsets)
    return answer


async def detokenize(state: ServerState, fields: Fields) -> dict:
    common.take_model(fields, state.engine_when_ready().info.name)
    request = pb.DetokenizeRequest()
    token_ids = fields.take("tokens", list)
    if token_ids is None:
        raise RequestError(Code.INVALID_ARGUMENT, "tokens: must be set", field="tokens")
    for index, token_id in enumerate(token_ids):
        _TOKEN_ID(f"tokens[{index}]", token_id)
    convert.set_field(request, "token_ids", token_ids)
    for name in ("skip_special_tokens", "return_offsets"):
        convert.set_field(request, name, fields.take(name, bool))
    fields.finish()
    try:
        response = await InferenceService(state).Detokenize(request, None)
    except RequestError as error:  # which speaks of token_ids
        raise RequestError(error.code, error.message.replace("token_ids", "tokens", 1),
                           field=error.field and error.field.replace("token_ids", "tokens")) from None
    answer = {"prompt": response.text}
    if request.return_offsets:
        answer["offsets"] = _pairs(response.offsets)
    return answer


def _pairs(spans: Iterable[pb.TextSpan]) -> list[list[int]]:
    return [[span.start, span.end] for span in spans]


def _refuse_bad_unicode(path: str, value: str | None) -> None:
    """JSON can spell half of a surrogate pair, which no UTF-8 can hold."""
    if value:
        text()(path, value)
