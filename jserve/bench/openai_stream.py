"""The same requests against a server that speaks OpenAI's /v1/completions: vLLM, SGLang, llama.cpp, jserve itself.

Token ids where the server returns them, else the running usage of each message, else the usage at the end; never the
number of messages, unless a server tells nothing else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from jserve.bench.driver import Piece, Stream
from jserve.bench.http_client import HttpClient
from jserve.request import Code, GenerateRequest, RequestError, Usage

PLAIN = ("temperature", "top_p", "seed", "max_tokens", "stop", "frequency_penalty", "presence_penalty")
EXTENSIONS = ("top_k", "min_p", "ignore_eos", "min_tokens", "repetition_penalty", "stop_token_ids")
"""Fields beyond OpenAI's, of vLLM and most servers after it; sent only where they are set."""
HELPERS = ("return_token_ids", "continuous_usage_stats")


def openai_stream(client: HttpClient, model: str) -> Stream:
    """A field that only helps to count and that the server refuses by name is left out from then on."""
    unknown: set[str] = set()

    async def events(request: GenerateRequest) -> AsyncIterator[dict]:
        while True:
            path, message = to_message(request, model)
            left_out = frozenset(unknown)
            for name in left_out:
                message.pop(name, None)
                message["stream_options"].pop(name, None)
            try:
                async for event in client.events(path, message):
                    yield event
                return
            except RequestError as error:
                refused = {name for name in HELPERS if name in error.message} - left_out
                if error.code is not Code.INVALID_ARGUMENT or not refused:
                    raise
                unknown.update(refused)

    async def stream(request: GenerateRequest) -> AsyncIterator[Piece]:
        num_before: int | None = 0
        async for event in events(request):
            piece = _piece(event, num_before)
            if piece.num_tokens is None or num_before is None:
                num_before = None  # text without a count came: a usage at the end is not this message's alone
            elif piece.usage is not None:
                num_before = piece.usage.completion_tokens
            elif piece.num_tokens is not None:
                num_before += piece.num_tokens
            yield piece

    return stream


def to_message(request: GenerateRequest, model: str) -> tuple[str, dict[str, object]]:
    """(path, body) of a request."""
    params = request.sampling_params
    message: dict[str, object] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
    }
    for name in (*PLAIN, *EXTENSIONS):
        value = getattr(params, name)
        if value is not None and value != () and value != []:
            message[name] = value
    if request.messages:
        turns = [{"role": turn.role, "content": turn.content} for turn in request.messages]
        return "/v1/chat/completions", message | {"messages": turns}
    prompt = list(request.prompt_token_ids) if request.prompt_token_ids is not None else request.prompt
    if prompt is None:
        raise RequestError(Code.INVALID_ARGUMENT, "a request without prompt, prompt_token_ids or messages")
    return "/v1/completions", message | {"prompt": prompt}


def _piece(event: dict, num_before: int | None) -> Piece:
    usage = _usage(event.get("usage"))
    choices = event.get("choices") or ()
    if not choices:
        return Piece(0, usage=usage)
    choice = choices[0]
    text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    token_ids = choice.get("token_ids")
    if token_ids is not None:
        num_tokens = len(token_ids)
    elif usage is not None and num_before is not None:
        num_tokens = usage.completion_tokens - num_before
    else:
        num_tokens = None if text else 0
    return Piece(num_tokens, token_ids or (), len(text), choice.get("finish_reason") is not None, usage)


def _usage(usage: dict | None) -> Usage | None:
    if not usage:
        return None
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0, details.get("cached_tokens") or 0
    )
