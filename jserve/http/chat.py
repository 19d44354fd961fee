"""/v1/chat/completions: messages through the model's chat template, and OpenAI's objects from the updates."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from jserve.access.gate import Caller
from jserve.engine.info import ModelInfo
from jserve.http import fields as common
from jserve.http.body import Fields
from jserve.http.completions import FINISH_REASONS
from jserve.http.logprobs import chat_logprobs, prompt_logprobs
from jserve.http.run import results_of, total_usage, updates_of
from jserve.request import Code, GenerateRequest, Message, OutputDelta, RequestError, SamplingParams, invalid
from jserve.server.state import ServerState


@dataclass(frozen=True)
class ChatCall:
    id: str
    model: str
    request: GenerateRequest
    top_logprobs: int | None
    """None: no logprobs are asked for."""
    delivery: common.Delivery


def read_call(fields: Fields, info: ModelInfo, call_id: str) -> ChatCall:
    """The call that the body spells, or RequestError."""
    common.take_model(fields, info.name)
    messages = take_messages(fields)
    delivery = common.take_delivery(fields)
    tools = _take_offered_tools(fields)
    of_request = common.take_request_fields(fields)
    fields.take_neutral("modalities", ["text"])
    most = fields.take("max_completion_tokens")
    top_logprobs = _take_logprobs(fields)
    values = common.take_sampling(fields, besides=("logprobs",))
    fields.finish()
    if most is not None:
        if values.get("max_tokens", most) != most:
            raise invalid("max_tokens", values["max_tokens"], f"max_completion_tokens says {most}")
        values["max_tokens"] = most
        fields.spelled["max_tokens"] = "max_completion_tokens"
    fields.spelled["logprobs"] = "top_logprobs"
    params = SamplingParams(**values, logprobs=top_logprobs)
    request_id = common.name_of(of_request, call_id)
    request = GenerateRequest(messages=messages, tools=tools, sampling_params=params, request_id=request_id,
                              **of_request)
    return ChatCall(call_id, info.name, request, top_logprobs, delivery)


async def answer(state: ServerState, caller: Caller, call: ChatCall) -> dict:
    """The whole answer as one object."""
    [result] = await results_of(state, caller, [call.request])
    choices = []
    for delta in sorted(result.outputs, key=lambda delta: delta.index):
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        choices.append({"index": delta.index, "message": message, **_rest_of_choice(call, delta)})
    whole = {**_head(call, "chat.completion"), "choices": choices, "usage": total_usage([result.usage])}
    if result.prompt_logprobs is not None:
        whole["prompt_logprobs"] = prompt_logprobs(result.prompt_logprobs)
    return whole


async def chunks(state: ServerState, caller: Caller, call: ChatCall) -> AsyncGenerator[dict, None]:
    """The answer in pieces, as it is made; the role goes with the first piece of each choice."""
    head = _head(call, "chat.completion.chunk")
    if call.delivery.include_usage:
        head["usage"] = None
    seen, usage, more = set(), None, {}
    async for _, update in updates_of(state, caller, [call.request]):
        if update.prompt_logprobs is not None:
            more = {"prompt_logprobs": prompt_logprobs(update.prompt_logprobs)}
        for delta in update.outputs:
            content = {"content": delta.text}
            if delta.index not in seen:
                seen.add(delta.index)
                content = {"role": "assistant", **content}
            choice = {"index": delta.index, "delta": content, **_rest_of_choice(call, delta)}
            yield {**head, "choices": [choice], **more}
            more = {}
        usage = update.usage or usage
    if call.delivery.include_usage:
        yield {**head, "choices": [], "usage": total_usage([usage])}


def take_messages(fields: Fields) -> list[Message]:
    given = fields.take("messages", list)
    if given is None:
        raise RequestError(Code.INVALID_ARGUMENT, "messages: must be set", field="messages")
    if not given:
        raise invalid("messages", given, "must not be empty")
    return [_message(item, f"messages[{index}]") for index, item in enumerate(given)]


def _rest_of_choice(call: ChatCall, delta: OutputDelta) -> dict:
    logprobs = None
    if call.top_logprobs is not None:
        logprobs = chat_logprobs(delta.logprobs or (), call.top_logprobs)
    ids = {"token_ids": delta.token_ids} if call.delivery.return_token_ids else {}
    return {"logprobs": logprobs, "finish_reason": FINISH_REASONS.get(delta.finish_reason),
            "stop_reason": delta.matched_stop, **ids}


def _head(call: ChatCall, kind: str) -> dict:
    return {"id": call.id, "object": kind, "created": int(time.time()), "model": call.model}


def _take_logprobs(fields: Fields) -> int | None:
    wanted = fields.take("logprobs", bool, default=False)
    top = fields.take("top_logprobs", int)
    if top is not None and not wanted:
        raise invalid("top_logprobs", top, "has no meaning without logprobs = true")
    return (top or 0) if wanted else None


def _message(item: object, path: str) -> Message:
    if not isinstance(item, dict):
        raise invalid(path, item, "must be an object with role and content")
    fields = Fields(item, f"{path}.")
    role = fields.take("role", str)
    if role is None:
        raise RequestError(Code.INVALID_ARGUMENT, f"{path}.role: must be set", field=f"{path}.role")
    calls = fields.take("tool_calls", list)
    content = fields.take("content", str, list)
    if content is None:
        if not calls:
            raise RequestError(Code.INVALID_ARGUMENT, f"{path}.content: must be set", field=f"{path}.content")
        content = ""
    elif content == []:
        raise invalid(f"{path}.content", content, "must not be empty")
    elif isinstance(content, list):
        content = "".join(_text_part(part, f"{path}.content[{index}]") for index, part in enumerate(content))
    name, tool_call_id = fields.take("name", str), fields.take("tool_call_id", str)
    fields.take_neutral("refusal")
    fields.finish()
    if calls is not None:
        calls = [_tool_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return Message(role, content, name=name, tool_call_id=tool_call_id, tool_calls=calls or None)


def _text_part(part: object, path: str) -> str:
    if not isinstance(part, dict):
        raise invalid(path, part, "must be an object such as {'type': 'text', 'text': ...}")
    fields = Fields(part, f"{path}.")
    kind = fields.take("type", str)
    if kind != "text":
        raise invalid(f"{path}.type", kind, "is not supported; only text is")
    text = fields.take("text", str)
    fields.finish()
    if text is None:
        raise RequestError(Code.INVALID_ARGUMENT, f"{path}.text: must be set", field=f"{path}.text")
    return text


def _tool_call(call: object, path: str) -> dict:
    """A call that the model made before.  Templates read its arguments as an object, not as the text of one."""
    match call:
        case {"function": {"name": str(name), "arguments": str(text)}}:
            try:
                arguments = json.loads(text)
            except ValueError as error:
                raise invalid(f"{path}.function.arguments", text, f"must be JSON: {error}") from None
            return {**call, "function": {**call["function"], "name": name, "arguments": arguments}}
    raise invalid(path, call, "must be an object with function.name and function.arguments")


def _take_offered_tools(fields: Fields) -> list[dict] | None:
    """What the template is given.  Which tool is called, if any, is the model's choice and cannot be forced."""
    tools = take_tools(fields)
    choice = fields.take("tool_choice")
    if choice not in (None, "auto", "none"):
        raise invalid("tool_choice", choice, "is not supported; only 'auto' and 'none' are")
    fields.take_neutral("parallel_tool_calls", True)
    return None if choice == "none" else tools


def take_tools(fields: Fields) -> list[dict] | None:
    """None where there are none, also in an empty list."""
    tools = fields.take("tools", list)
    for index, tool in enumerate(tools or ()):
        match tool:
            case {"type": "function", "function": {"name": str()}}:
                continue
        raise invalid(f"tools[{index}]", tool, "must be an object with type 'function' and function.name")
    return tools or None
