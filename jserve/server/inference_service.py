"""The Inference service: generation calls between gRPC and the engine, and text <-> token ids."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from functools import partial

import grpc

from jserve.proto_gen import inference_pb2 as pb
from jserve.request import Code, RequestError, invalid
from jserve.server import convert, convert_results
from jserve.server.callers import caller_of
from jserve.server.coalesce import Coalescer
from jserve.server.embed import embed
from jserve.server.score import score
from jserve.server.state import ServerState
from jserve.server.submit import submitted
from jserve.tokenizer import ChatTemplateError, decode_with_offsets


class InferenceService:
    """Cancelling a call's task (the client left, the deadline passed) aborts its request in the engine at once."""

    def __init__(self, state: ServerState):
        self._state = state

    async def Generate(self, message: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        call = Coalescer(convert.stream_interval(message))
        async with self._submitted(message, context, call):
            while (update := await call.next()) is not None:
                for response in convert_results.update_to_protos(update):
                    await context.write(response)

    async def GenerateUnary(
        self, message: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> pb.GenerateUnaryResponse:
        if message.HasField("stream"):
            raise RequestError(Code.INVALID_ARGUMENT, "stream: has no meaning in GenerateUnary", field="stream")
        call = Coalescer()
        async with self._submitted(message, context, call):
            result = await call.whole()
        if result.prompt_logprobs or any(output.logprobs for output in result.outputs):
            # Thousands of positions take a while; a thread lets other calls in between.
            return await asyncio.to_thread(convert_results.result_to_proto, result)
        return convert_results.result_to_proto(result)

    async def Embed(self, message: pb.EmbedRequest, context: grpc.aio.ServicerContext) -> pb.EmbedResponse:
        caller = caller_of(self._state.gate, context)
        return await embed(self._state, message, caller, _deadline(context))

    async def Score(self, message: pb.ScoreRequest, context: grpc.aio.ServicerContext) -> pb.ScoreResponse:
        caller = caller_of(self._state.gate, context)
        return await score(self._state, message, caller, _deadline(context))

    async def Tokenize(self, message: pb.TokenizeRequest, _: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        info = self._state.engine_when_ready().info
        is_chat = bool(message.messages)
        if message.HasField("prompt") == is_chat:
            raise RequestError(Code.INVALID_ARGUMENT, "prompt: exactly one of prompt and messages must be set",
                               field="prompt")
        for unused in ("add_special_tokens", "return_offsets") if is_chat else ("add_generation_prompt", "tools"):
            if any(field.name == unused for field, _ in message.ListFields()):
                other = "messages" if is_chat else "a prompt"
                raise RequestError(Code.INVALID_ARGUMENT, f"{unused}: has no meaning with {other}", field=unused)
        offsets = []
        if is_chat:
            token_ids = await _encode_chat(info.tokenizer, message)
        else:
            add_special = message.add_special_tokens if message.HasField("add_special_tokens") else True
            encode = info.tokenizer.encode_with_offsets if message.return_offsets else info.tokenizer.encode
            token_ids = await asyncio.to_thread(encode, message.prompt, add_special=add_special)
            if message.return_offsets:
                token_ids, offsets = token_ids
        strings = map(info.tokenizer.token_text, token_ids) if message.return_token_strs else ()
        return pb.TokenizeResponse(token_ids=token_ids, count=len(token_ids), max_model_len=info.context_length,
                                   token_strs=strings, offsets=_spans(offsets))

    async def Detokenize(self, message: pb.DetokenizeRequest, _: grpc.aio.ServicerContext) -> pb.DetokenizeResponse:
        info = self._state.engine_when_ready().info
        for index, token_id in enumerate(message.token_ids):
            if not 0 <= token_id < info.vocab_size:
                raise invalid(f"token_ids[{index}]", token_id, f"must be in 0..{info.vocab_size - 1}")
        decode = decode_with_offsets if message.return_offsets else _decode
        text, offsets = await asyncio.to_thread(decode, info.tokenizer, message.token_ids, message.skip_special_tokens)
        return pb.DetokenizeResponse(text=text, offsets=_spans(offsets))

    def _submitted(
        self, message: pb.GenerateRequest, context: grpc.aio.ServicerContext, call: Coalescer
    ) -> AbstractAsyncContextManager[None]:
        self._state.engine_for_requests()  # UNAVAILABLE comes before what is wrong with the request
        if not message.HasField("request_id"):
            message.request_id = f"gen-{uuid.uuid4().hex}"
        request = convert.request_from_proto(message, deadline=_deadline(context))
        return submitted(self._state, request, caller_of(self._state.gate, context), call)


def _deadline(context: grpc.aio.ServicerContext) -> float | None:
    """The call's deadline in `time.monotonic()` seconds; one that has passed ends the call, the engine never sees it."""
    remaining = context.time_remaining()
    if remaining is None:
        return None
    if remaining <= 0:
        raise RequestError(Code.DEADLINE_EXCEEDED, "the deadline had passed when the request arrived")
    return time.monotonic() + remaining


def _decode(tokenizer, token_ids: Iterable[int], skip_special_tokens: bool) -> tuple[str, list]:
    return tokenizer.decode(token_ids, skip_special_tokens), []


def _spans(offsets: Iterable[tuple[int, int]]) -> list[pb.TextSpan]:
    return [pb.TextSpan(start=start, end=end) for start, end in offsets]


async def _encode_chat(tokenizer, message: pb.TokenizeRequest) -> list[int]:
    add_prompt = message.add_generation_prompt if message.HasField("add_generation_prompt") else True
    messages, tools = convert.messages_from_proto(message.messages), convert.tools_from_proto(message.tools)
    encode = partial(tokenizer.encode_chat, messages, add_generation_prompt=add_prompt, tools=tools)
    try:
        return await asyncio.to_thread(encode)
    except ChatTemplateError as error:
        raise RequestError(Code.INVALID_ARGUMENT, str(error), field=error.field) from None
    except ValueError as error:
        raise RequestError(Code.INVALID_ARGUMENT, f"messages: {error}", field="messages") from None
