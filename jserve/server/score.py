"""Score: log-likelihoods of given continuations of a prompt, for evaluation harnesses; prompt_logprobs do the work.

Each continuation is a request of its own, of which nothing is generated; at most NUM_AT_ONCE run at a time.
"""

from __future__ import annotations

import asyncio
import uuid

from jserve.access.gate import Caller
from jserve.proto_gen import inference_pb2 as pb
from jserve.request import Code, GenerateRequest, GenerateUpdate, RequestError, SamplingParams, invalid
from jserve.server.several import in_order, whole_result
from jserve.server.state import ServerState
from jserve.tokenizer import PromptTooLong, Tokenizer

NUM_AT_ONCE = 16
MAX_CONTINUATIONS = 1024


async def score(
    state: ServerState, message: pb.ScoreRequest, caller: Caller, deadline: float | None
) -> pb.ScoreResponse:
    """RequestError names the field where something cannot be scored."""
    engine = state.engine_for_requests()
    _check(message)
    request_id = message.request_id if message.HasField("request_id") else f"score-{uuid.uuid4().hex}"
    context = engine.info.context_length
    pieces = await asyncio.to_thread(_token_ids, engine.info.tokenizer, message, context)
    room = asyncio.Semaphore(NUM_AT_ONCE)

    async def one(index: int, token_ids: list[int]) -> GenerateUpdate:
        request = GenerateRequest(
            prompt_token_ids=token_ids,
            sampling_params=SamplingParams(max_tokens=0, prompt_logprobs=0),
            request_id=f"{request_id}-{index}",
            lora_name=message.lora_name if message.HasField("lora_name") else None,
            deadline=deadline,
        )
        try:
            return await whole_result(state, request, caller, room)
        except RequestError as error:
            raise _in_our_names(error, message, index) from None

    results = await in_order([one(index, token_ids) for index, (_, token_ids) in enumerate(pieces)])
    scores = [_score(start, token_ids, result) for (start, token_ids), result in zip(pieces, results)]
    usage = pb.Usage(
        prompt_tokens=sum(len(token_ids) for _, token_ids in pieces), completion_tokens=0, cached_tokens=0
    )
    return pb.ScoreResponse(request_id=request_id, scores=scores, usage=usage)


def _check(message: pb.ScoreRequest) -> None:
    if message.HasField("prompt") == bool(message.prompt_token_ids):
        raise RequestError(Code.INVALID_ARGUMENT, "prompt: exactly one of prompt and prompt_token_ids must be set",
                           field="prompt")
    if not 1 <= len(message.continuations) <= MAX_CONTINUATIONS:
        raise invalid("continuations", f"{len(message.continuations)} entries", f"must be 1 to {MAX_CONTINUATIONS}")


def _token_ids(tokenizer: Tokenizer, message: pb.ScoreRequest, context: int) -> list[tuple[int, list[int]]]:
    """For each continuation (place of its first token, ids of prompt and continuation).

    A text prompt and its continuation are tokenized together, as a harness does; what is scored begins at the first token
    that the prompt alone does not have.
    """

    def encode(path: str, text: str, **how: bool) -> list[int]:
        try:
            return tokenizer.encode(text, max_tokens=context, **how)
        except PromptTooLong as error:
            raise _too_long(path, f"at least {error.at_least}", context) from None

    pieces = []
    has_text = message.HasField("prompt")
    alone = encode("prompt", message.prompt, add_special=True) if has_text else list(message.prompt_token_ids)
    for index, continuation in enumerate(message.continuations):
        path = f"continuations[{index}]"
        if has_text:
            whole = encode(path, message.prompt + continuation, add_special=True)
            start = next((i for i, (a, b) in enumerate(zip(alone, whole)) if a != b), min(len(alone), len(whole)))
        else:
            whole = alone + encode(path, continuation, add_special=False, parse_special=False)
            start = len(alone)
        if len(whole) > context:
            raise _too_long(path if len(alone) < context else "prompt", str(len(whole)), context)
        if start == len(whole):
            raise invalid(path, continuation, "must have a token of its own")
        if start == 0:
            raise invalid("prompt", message.prompt, f"no token of it stands before {path}, whose first one would have no score")
        pieces.append((start, whole))
    return pieces


def _too_long(path: str, num_tokens: str, context: int) -> RequestError:
    with_prompt = " with the prompt" if path != "prompt" else ""
    return invalid(path, f"{num_tokens} tokens", f"exceeds the context of {context} tokens{with_prompt}")


def _in_our_names(error: RequestError, message: pb.ScoreRequest, index: int) -> RequestError:
    """Speaks of what the client sent where the engine speaks of ids that were made of it."""
    if message.HasField("prompt") and (error.field or "").startswith("prompt_token_ids"):
        path = f"continuations[{index}]"
        return RequestError(error.code, error.message.replace("prompt_token_ids", path, 1), field=path)
    return error


def _score(start: int, token_ids: list[int], result: GenerateUpdate) -> pb.ContinuationScore:
    entries = [entry.chosen for entry in result.prompt_logprobs[start:]]
    return pb.ContinuationScore(
        logprob=sum(entry.logprob for entry in entries),
        is_greedy=all(entry.rank == 1 for entry in entries),
        token_ids=token_ids[start:],
        token_logprobs=[entry.logprob for entry in entries],
    )
