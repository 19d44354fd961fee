"""/v1/embeddings: one request for each input, a bounded number of them at a time."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import dataclass

import numpy as np

from jserve.access.gate import Caller
from jserve.engine.info import ModelInfo
from jserve.http import fields as common
from jserve.http.body import Fields, take_prompts
from jserve.http.run import of_item
from jserve.request import GenerateRequest, Pooling, RequestError, invalid
from jserve.server.embed import DEFAULT_POOLING, PROMPT_ONLY, embedding_of
from jserve.server.several import in_order
from jserve.server.state import ServerState

MAX_INPUTS = 2048


@dataclass(frozen=True)
class EmbeddingsCall:
    model: str
    requests: tuple[GenerateRequest, ...]
    normalize: bool
    as_base64: bool
    dimensions: int | None
    num_at_once: int


def read_call(fields: Fields, info: ModelInfo, call_id: str) -> EmbeddingsCall:
    """The call that the body spells, or RequestError."""
    common.take_model(fields, info.name)
    inputs = take_prompts(fields, "input", MAX_INPUTS)
    encoding = fields.take("encoding_format", str, default="float")
    if encoding not in ("float", "base64"):
        raise invalid("encoding_format", encoding, "must be float or base64")
    pooling = _take_pooling(fields)
    normalize = fields.take("normalize", bool, default=True)
    dimensions = fields.take("dimensions", int)
    of_request = common.take_request_fields(fields)
    fields.finish()
    name = common.name_of(of_request, call_id)
    requests = []
    for number, given in enumerate(inputs):
        prompt = {"prompt": given} if isinstance(given, str) else {"prompt_token_ids": given}
        request_id = name if len(inputs) == 1 else f"{name}-{number}"
        requests.append(
            GenerateRequest(**prompt, **of_request, request_id=request_id, sampling_params=PROMPT_ONLY, pooling=pooling)
        )
    return EmbeddingsCall(info.name, tuple(requests), normalize, encoding == "base64", dimensions, info.max_num_seqs)


async def answer(state: ServerState, caller: Caller, call: EmbeddingsCall) -> dict:
    """The whole answer as one object."""
    room = asyncio.Semaphore(call.num_at_once)

    async def one(number: int, request: GenerateRequest) -> tuple[np.ndarray, int]:
        try:
            vector, usage = await embedding_of(state, request, caller, room, normalize=call.normalize)
        except RequestError as error:
            raise of_item(error, f"input[{number}]" if len(call.requests) > 1 else "input") from None
        if call.dimensions not in (None, len(vector)):
            raise invalid("dimensions", call.dimensions, f"this model's embeddings have {len(vector)}")
        return vector, usage.prompt_tokens

    results = await in_order([one(number, request) for number, request in enumerate(call.requests)])
    num_tokens = sum(count for _, count in results)
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _encoded(vector) if call.as_base64 else vector.tolist()}
            for index, (vector, _) in enumerate(results)
        ],
        "model": call.model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _take_pooling(fields: Fields) -> Pooling:
    name = fields.take("pooling", str, default=DEFAULT_POOLING.value)
    try:
        return Pooling(name.lower())
    except ValueError:
        raise invalid("pooling", name, f"must be one of {', '.join(item.value for item in Pooling)}") from None


def _encoded(vector: np.ndarray) -> str:
    """As the OpenAI client decodes it: little-endian float32."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
