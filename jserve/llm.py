"""The offline API: `LLM("smollm2-135m").generate([...])`, with no server and no asyncio to see.

Thin: an `AsyncEngine` on an event loop in a thread of its own.  It builds requests and joins their updates, no more.
"""

from __future__ import annotations

import asyncio
import dataclasses
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence

from jserve.cli.config_file import override_tables
from jserve.config import Config
from jserve.local_engine import most_in_flight, start_engine
from jserve.loop_thread import LoopThread
from jserve.request import Code, GenerateRequest, Message, RequestError, SamplingParams, invalid
from jserve.results import RequestOutput, collect
from jserve.sampling.validate import truncate_prompt

Prompt = str | Sequence[int] | Mapping[str, object]
"""Text, token ids, or {"prompt": text} | {"prompt_token_ids": ids} | {"messages": [{"role", "content"}, ...]}."""


class LLM:
    """A model, loaded and compiled, that answers prompts in this process.

        with LLM("smollm2-135m", kv={"memory_bytes": 2**28}) as llm:
            for output in llm.generate(["Hello", "Once upon a time"], SamplingParams(temperature=0, max_tokens=20)):
                print(output.outputs[0].text)

    Keyword arguments are sections of the config with the keys to change, as in TOML.  Raises ConfigError for a model
    or setting that cannot be used.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: Config | None = None,
        report: Callable[[str], None] = lambda line: None,
        **sections: Mapping[str, object],
    ):
        config = override_tables(config or Config(), sections)
        if model is not None:
            config = config.replace("model", path=str(model))
        self._max_waiting = config.scheduler.max_waiting
        self._loop = LoopThread("jserve-llm")
        try:
            self._engine = self._loop.run(start_engine(config, _Lines(report)))
        except BaseException:
            self._loop.close()
            raise

    @property
    def info(self):
        """The engine's `ModelInfo`: context length, tokenizer, what the model can do."""
        return self._engine.info

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """One RequestOutput a prompt, in order; the prompts run together.

        `prompts` is one prompt or a list of them (a list of ints is one prompt); `sampling_params` is for all, or one a
        prompt.  Raises RequestError for the first prompt that cannot be served, after the others were stopped.
        """
        prompts = [prompts] if _is_one_prompt(prompts) else list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(prompts)
        else:
            params = list(sampling_params)
            if len(params) != len(prompts):
                raise ValueError(f"{len(params)} sampling_params for {len(prompts)} prompts: give one, or one a prompt")
        return self._answer([_request_from(prompt, one) for prompt, one in zip(prompts, params, strict=True)])

    def chat(
        self,
        messages: Sequence[Mapping[str, object] | Message] | Sequence[Sequence[Mapping[str, object] | Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        tools: Sequence[Mapping] | None = None,
    ) -> list[RequestOutput]:
        """The model's next turn of one conversation, or of each of a list of conversations, by its chat template.

        `tools` are OpenAI's objects, shown to the model where its template has a place for them.
        """
        one = bool(messages) and isinstance(messages[0], (Mapping, Message))
        prompts = [{"messages": turns, "tools": tools} for turns in ([messages] if one else messages)]
        return self.generate(prompts, sampling_params)

    def close(self) -> None:
        """Frees the model and ends the thread.  Calling it again does nothing."""
        if not self._loop.closed:
            self._loop.run(self._engine.close())
            self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _answer(self, requests: list[GenerateRequest]) -> list[RequestOutput]:
        if self._loop.closed:
            raise RequestError(Code.UNAVAILABLE, "this LLM is closed")
        return self._loop.run(_gather(self._engine, requests, most_in_flight(self._engine, self._max_waiting)))


class _Lines:
    """A start's report of which only the lines are wanted."""

    def __init__(self, line: Callable[[str], None]):
        self.line = line

    def progress(self, phase: str, done: int, total: int) -> None:
        pass


async def _gather(engine, requests: list[GenerateRequest], limit: int) -> list[RequestOutput]:
    """All results, in order; the first error ends the others."""
    free = asyncio.Semaphore(limit)

    async def one(request: GenerateRequest) -> RequestOutput:
        async with free:
            result = await collect(request, engine.generate(request))
            result.prompt_token_ids = await _prompt_token_ids(engine, request)
            return result

    tasks = [asyncio.ensure_future(one(request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _prompt_token_ids(engine, request: GenerateRequest) -> list[int]:
    """The ids that the engine made of a prompt; its updates do not carry them."""
    if request.prompt_token_ids is not None:
        token_ids = list(request.prompt_token_ids)
    elif request.prompt is not None:
        token_ids = await engine.tokenize(request.prompt)
    else:
        token_ids = engine.tokenizer.encode_chat(request.messages, tools=request.tools)
    return truncate_prompt(request.sampling_params, token_ids)


def _is_one_prompt(prompts) -> bool:
    if isinstance(prompts, (str, Mapping)):
        return True
    return len(prompts) > 0 and all(isinstance(item, numbers.Integral) for item in prompts)


def _request_from(prompt: Prompt, params: SamplingParams) -> GenerateRequest:
    if isinstance(prompt, str):
        return GenerateRequest(prompt=prompt, sampling_params=params)
    if not isinstance(prompt, Mapping):
        try:
            token_ids = [operator.index(token_id) for token_id in prompt]
        except TypeError:
            raise invalid("prompts", prompt, "a prompt is text, a list of token ids, or a dict") from None
        return GenerateRequest(prompt_token_ids=token_ids, sampling_params=params)
    known = {one.name for one in dataclasses.fields(GenerateRequest)} - {"sampling_params", "tenant", "deadline"}
    fields = dict(prompt)
    for name in fields:
        if name not in known:
            raise invalid(name, fields[name], f"unknown key of a prompt; known: {', '.join(sorted(known))}")
    if fields.get("messages") is not None:
        fields["messages"] = [_message(turn) for turn in fields["messages"]]
    return GenerateRequest(**fields, sampling_params=params)


def _message(turn: Mapping[str, object] | Message) -> Message:
    if isinstance(turn, Message):
        return turn
    known = {one.name for one in dataclasses.fields(Message)}
    if not {"role", "content"} <= set(turn) <= known:
        more = ", ".join(sorted(known - {"role", "content"}))
        raise invalid("messages", turn, f"each message has role and content, and may have {more}")
    return Message(**turn)
