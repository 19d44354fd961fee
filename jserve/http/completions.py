"""/v1/completions: one GenerateRequest for each prompt, and OpenAI's objects from their updates."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from jserve.access.gate import Caller
from jserve.engine.info import ModelInfo
from jserve.http import fields as common
from jserve.http.body import Fields, take_prompts
from jserve.http.logprobs import CompletionLogprobs, prompt_logprobs
from jserve.http.run import results_of, total_usage, updates_of
from jserve.request import FinishReason, GenerateRequest, OutputDelta, PositionLogprobs, RequestError
from jserve.request import SamplingParams, Usage, invalid
from jserve.server.state import ServerState
from jserve.tokenizer import PromptTooLong

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024

FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORTED: "abort"}


@dataclass(frozen=True)
class Prompt:
    """One prompt of the call."""

    request: GenerateRequest
    echo: str = ""
    """Text that goes before the output's."""
    first_token: tuple[str, bytes] = ("", b"")
    """Text and bytes of the first token, for logprobs of an echo."""
    hidden: tuple[bool, ...] = ()
    """For each token whether `echo` leaves it out, for logprobs of an echo."""


@dataclass(frozen=True)
class CompletionCall:
    id: str
    model: str
    prompts: tuple[Prompt, ...]
    n: int
    echo: bool
    logprobs: int | None
    shows_prompt_logprobs: bool
    is_hidden: Callable[[int], bool]
    """Whether the text of an output leaves this token out."""
    delivery: common.Delivery

    @property
    def requests(self) -> list[GenerateRequest]:
        return [prompt.request for prompt in self.prompts]


async def read_call(fields: Fields, info: ModelInfo, call_id: str) -> CompletionCall:
    """The call that the body spells, or RequestError."""
    common.take_model(fields, info.name)
    inputs = take_prompts(fields, "prompt", MAX_PROMPTS)
    delivery = common.take_delivery(fields)
    echo = fields.take("echo", bool, default=False)
    fields.take_neutral("suffix", "")
    of_request = common.take_request_fields(fields)
    values = {"max_tokens": DEFAULT_MAX_TOKENS, **common.take_sampling(fields)}
    fields.finish()
    asked_prompt_logprobs = values.get("prompt_logprobs") is not None
    logprobs = values.get("logprobs")
    if echo and logprobs is not None:
        if asked_prompt_logprobs and values["prompt_logprobs"] != logprobs:
            raise invalid("prompt_logprobs", values["prompt_logprobs"], f"echo asks for {logprobs}, as logprobs says")
        values["prompt_logprobs"] = logprobs
    if echo and values.get("truncate_prompt_tokens") is not None:
        raise invalid("truncate_prompt_tokens", values["truncate_prompt_tokens"], "is not supported together with echo")
    params, name = SamplingParams(**values), common.name_of(of_request, call_id)
    prompts = []
    for number, given in enumerate(inputs):
        request_id = name if len(inputs) == 1 else f"{name}-{number}"
        prompts.append(await _prompt(given, info, params, {**of_request, "request_id": request_id}, echo))
    return CompletionCall(
        id=call_id,
        model=info.name,
        prompts=tuple(prompts),
        n=params.n if isinstance(params.n, int) else 1,
        echo=echo,
        logprobs=logprobs,
        shows_prompt_logprobs=asked_prompt_logprobs,
        is_hidden=info.tokenizer.is_special if _skips_special(params) else lambda token_id: False,
        delivery=delivery,
    )


async def answer(state: ServerState, caller: Caller, call: CompletionCall) -> dict:
    """The whole answer as one object."""
    results = await results_of(state, caller, call.requests)
    choices = []
    for number, result in enumerate(results):
        for delta in sorted(result.outputs, key=lambda delta: delta.index):
            choices.append(_Choice(call, number, delta.index).piece(delta, result.prompt_logprobs))
    return {**_head(call), "choices": choices, "usage": total_usage([result.usage for result in results])}


async def chunks(state: ServerState, caller: Caller, call: CompletionCall) -> AsyncGenerator[dict, None]:
    """The answer in pieces, as it is made."""
    head = _head(call)
    if call.delivery.include_usage:
        head["usage"] = None
    choices: dict[tuple[int, int], _Choice] = {}
    scores: dict[int, list[PositionLogprobs | None]] = {}
    usages: list[Usage] = []
    async for number, update in updates_of(state, caller, call.requests):
        if update.prompt_logprobs is not None:
            scores[number] = update.prompt_logprobs
        for delta in update.outputs:
            key = number, delta.index
            if key not in choices:
                choices[key] = _Choice(call, number, delta.index)
            yield {**head, "choices": [choices[key].piece(delta, scores.get(number))]}
        if update.usage is not None:
            usages.append(update.usage)
    if call.delivery.include_usage:
        yield {**head, "choices": [], "usage": total_usage(usages)}


class _Choice:
    """One choice on its way out; the prompt's text and logprobs go with its first piece."""

    def __init__(self, call: CompletionCall, number: int, index: int):
        self._call = call
        self._prompt = call.prompts[number]
        self._index = number * call.n + index
        self._is_first = True
        self._logprobs = CompletionLogprobs()

    def piece(self, delta: OutputDelta, scores: list[PositionLogprobs | None] | None) -> dict:
        text = delta.text
        positions = [(position, self._call.is_hidden(position.chosen.token_id)) for position in delta.logprobs or ()]
        piece = {"index": self._index, "text": text, "logprobs": None,
                 "finish_reason": FINISH_REASONS.get(delta.finish_reason), "stop_reason": delta.matched_stop}
        if self._call.delivery.return_token_ids:
            piece["token_ids"] = delta.token_ids
        if self._is_first:
            self._is_first = False
            if self._call.echo:
                piece["text"] = self._prompt.echo + text
                positions = [*zip(scores or (), self._prompt.hidden), *positions]
            if self._call.shows_prompt_logprobs and scores is not None:
                piece["prompt_logprobs"] = prompt_logprobs(scores)
        if self._call.logprobs is not None:
            piece["logprobs"] = self._logprobs.piece(positions, self._prompt.first_token)
        return piece


def _head(call: CompletionCall) -> dict:
    return {"id": call.id, "object": "text_completion", "created": int(time.time()), "model": call.model}


async def _prompt(
    given: str | list[int], info: ModelInfo, params: SamplingParams, of_request: dict, echo: bool
) -> Prompt:
    if not echo:
        return Prompt(_request(given, params, of_request))
    if isinstance(given, str) and params.logprobs is None:
        return Prompt(_request(given, params, of_request), echo=given)
    text = given if isinstance(given, str) else None
    if text is not None:  # the first token has no logprob that would tell its text, so the ids are needed here
        given = await _token_ids(text, info)
    tokenizer, request = info.tokenizer, _request(given, params, of_request)
    if not _are_known_ids(given, info.vocab_size):
        return Prompt(request)  # the validator refuses it by name
    first = tokenizer.token_text(given[0]), tokenizer.token_bytes(given[0])
    if text is None:
        skips = _skips_special(params)
        hidden = tuple(skips and tokenizer.is_special(token_id) for token_id in given)
        text = tokenizer.decode(given, skips)
    else:  # control tokens that the text spells are in it, a BOS that was added is not
        hidden = (tokenizer.is_special(given[0]) and not text.startswith(first[0]), *[False] * (len(given) - 1))
    return Prompt(request, text, first, hidden)


def _skips_special(params: SamplingParams) -> bool:
    return params.skip_special_tokens is not False


def _request(given: str | list[int], params: SamplingParams, of_request: dict) -> GenerateRequest:
    if isinstance(given, str):
        return GenerateRequest(prompt=given, sampling_params=params, **of_request)
    return GenerateRequest(prompt_token_ids=given, sampling_params=params, **of_request)


async def _token_ids(text: str, info: ModelInfo) -> list[int]:
    try:
        return await asyncio.to_thread(
            info.tokenizer.encode, text, add_special=True, max_tokens=info.context_length)
    except PromptTooLong as error:
        raise invalid("prompt", f"at least {error.at_least} tokens",
                      f"exceeds the context of {info.context_length} tokens") from None


def _are_known_ids(given: list, vocab_size: int) -> bool:
    return bool(given) and set(map(type, given)) == {int} and min(given) >= 0 and max(given) < vocab_size
