"""Embed: pooled hidden states of a prompt, for gRPC and for HTTP."""

from __future__ import annotations

import asyncio
import uuid

import numpy as np

from jserve.access.gate import Caller
from jserve.proto_gen import inference_pb2 as pb
from jserve.request import Code, GenerateRequest, Pooling, RequestError, SamplingParams, Usage, invalid
from jserve.server.several import whole_result
from jserve.server.state import ServerState

DEFAULT_POOLING = Pooling.LAST
"""In a causal model the last token alone has seen the whole prompt."""
PROMPT_ONLY = SamplingParams(max_tokens=0)


async def embed(
    state: ServerState, message: pb.EmbedRequest, caller: Caller, deadline: float | None
) -> pb.EmbedResponse:
    """RequestError names the field where something cannot be embedded."""
    state.engine_for_requests()
    request_id = message.request_id if message.HasField("request_id") else f"embed-{uuid.uuid4().hex}"
    request = GenerateRequest(
        prompt=message.prompt if message.HasField("prompt") else None,
        prompt_token_ids=list(message.prompt_token_ids) or None,
        sampling_params=PROMPT_ONLY,
        request_id=request_id,
        lora_name=message.lora_name if message.HasField("lora_name") else None,
        pooling=_pooling(message),
        deadline=deadline,
    )
    vector, usage = await embedding_of(state, request, caller, asyncio.Semaphore(1), normalize=message.normalize)
    return pb.EmbedResponse(
        request_id=request_id,
        embedding=vector,
        usage=pb.Usage(prompt_tokens=usage.prompt_tokens, completion_tokens=0, cached_tokens=usage.cached_tokens),
    )


async def embedding_of(
    state: ServerState, request: GenerateRequest, caller: Caller, room: asyncio.Semaphore, *, normalize: bool
) -> tuple[np.ndarray, Usage]:
    """f32[D], scaled to length 1 where asked for."""
    result = await whole_result(state, request, caller, room)
    if result.embedding is None:
        raise RequestError(Code.ABORTED, f"request {request.request_id} was aborted")
    vector = np.asarray(result.embedding, np.float32)
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return (vector / np.float32(length) if normalize and length > 0 else vector), result.usage


def _pooling(message: pb.EmbedRequest) -> Pooling:
    if message.pooling == pb.POOLING_UNSPECIFIED:
        return DEFAULT_POOLING
    try:
        return Pooling[pb.Pooling.Name(message.pooling)]
    except ValueError:
        raise invalid("pooling", message.pooling, f"must be one of {', '.join(item.name for item in Pooling)}") from None
