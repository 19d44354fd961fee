"""The one validator of requests, for gRPC, HTTP, `batch` and the offline API.

Every refusal is an INVALID_ARGUMENT that names the field and the value.  Ids are checked here because JAX would clamp
or drop them without a word.  Tokenising and the engine come after; no jax.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from jserve.request import (
    EarlyStopping,
    GenerateRequest,
    Message,
    Pooling,
    RequestError,
    Sampling,
    SamplingParams,
    StructuredOutput,
    invalid,
)
from jserve.sampling import fields, limits
from jserve.sampling.bad_words import token_sequences
from jserve.sampling.limits import ModelLimits

_STRUCTURED = ("json_schema", "json_object", "regex", "grammar", "choice")
_UNDEFINED_WITH_STRUCTURED = ("ignore_eos", "min_tokens", "allowed_token_ids", "bad_words", "stop", "stop_token_ids")
_DEFAULTABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def resolve(
    params: SamplingParams, model: ModelLimits, num_prompt_tokens: int, prompt_field: str = "prompt"
) -> Sampling:
    """Final values of every field, or RequestError.

    `num_prompt_tokens` counts the tokenised prompt; before or after `truncate_prompt` makes no difference.
    `prompt_field` is the field of the request that held it.
    """
    asked = _read_fields(params, model)
    num_prompt_tokens = min(num_prompt_tokens, asked["truncate_prompt_tokens"] or num_prompt_tokens)
    room = _room_after_prompt(num_prompt_tokens, asked["max_tokens"], model, prompt_field)
    max_tokens = room if asked["max_tokens"] is None else min(asked["max_tokens"], room)
    min_tokens = asked["min_tokens"] or 0
    _check_min_tokens(min_tokens, asked["max_tokens"], room, num_prompt_tokens, model)
    n = _or(asked["n"], 1)
    best_of = _or(asked["best_of"], n)
    if best_of < n:
        raise invalid(_path("best_of"), best_of, f"must not be smaller than n ({n})")
    beam_width = _or(asked["beam_width"], 1)
    if beam_width > 1:
        _check_beams(params, beam_width, n, max_tokens, model)
        best_of = n
        _check_group_fits("beam_width", beam_width, num_prompt_tokens, model)
    else:
        _refuse_without_beams(asked)
        _check_group_fits("best_of" if asked["best_of"] else "n", best_of, num_prompt_tokens, model)

    if beam_width > 1:  # the model's defaults are for drawing
        asked |= dict.fromkeys(_DEFAULTABLE) | {"temperature": 0.0, "seed": 0}
    temperature = _or(asked["temperature"], 1.0)
    stop_token_ids = frozenset(asked["stop_token_ids"] or ())
    if asked["include_stop_str_in_output"] and not asked["stop"] and not stop_token_ids:
        raise invalid(_path("include_stop_str_in_output"), True, "has no meaning without stop or stop_token_ids")
    banned = tuple(sorted(stop_token_ids | set(model.eos_token_ids))) if min_tokens else ()
    if banned and not set(range(min(model.num_sampled_tokens, len(banned) + 1))) - set(banned):
        raise invalid(_path("min_tokens"), min_tokens, "EOS and stop_token_ids leave no token to sample below it")
    structured = _structured(asked)
    bad_words = bad_word_ids(asked["bad_words"], model)
    _check_tokens_left(asked["allowed_token_ids"], bad_words, banned, model)
    top_k = max(_or(asked["top_k"], 0), 0)
    return Sampling(
        temperature=max(temperature, limits.MIN_TEMPERATURE) if temperature else 0.0,
        top_p=_or(asked["top_p"], 1.0),
        top_k=top_k if top_k < model.num_sampled_tokens else 0,
        min_p=_or(asked["min_p"], 0.0),
        seed=secrets.randbits(64) - 2**63 if asked["seed"] is None else asked["seed"],
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=asked["stop"] or (),
        stop_token_ids=stop_token_ids,
        eos_token_ids=frozenset() if asked["ignore_eos"] else frozenset(model.eos_token_ids),
        # As in vLLM the floor masks EOS under ignore_eos too.
        banned_below_min_tokens=banned,
        include_stop_str_in_output=bool(asked["include_stop_str_in_output"]),
        skip_special_tokens=_or(asked["skip_special_tokens"], True),
        logprobs=asked["logprobs"],
        prompt_logprobs=asked["prompt_logprobs"],
        repetition_penalty=_or(asked["repetition_penalty"], 1.0),
        presence_penalty=_or(asked["presence_penalty"], 0.0),
        frequency_penalty=_or(asked["frequency_penalty"], 0.0),
        logit_bias=asked["logit_bias"] or (),
        allowed_token_ids=asked["allowed_token_ids"] or (),
        bad_words=bad_words,
        structured=structured,
        n=n,
        best_of=best_of,
        beam_width=beam_width,
        length_penalty=_or(asked["length_penalty"], 1.0),
        early_stopping=_or(asked["early_stopping"], EarlyStopping.HEURISTIC),
    )


def validate_request(request: GenerateRequest, model: ModelLimits) -> None:
    """Everything that can be refused before the prompt is tokenised; `resolve` does the rest."""
    if not isinstance(request.sampling_params, SamplingParams):
        raise invalid("sampling_params", request.sampling_params, "must be a SamplingParams")
    _read_fields(request.sampling_params, model)
    _check_prompt(request, model)
    if request.request_id is not None:
        _check_request_id(request.request_id)
    if request.lora_name is not None:
        raise invalid("lora_name", request.lora_name, "LoRA adapters are not supported yet; unset is the model itself")
    if request.priority is not None:
        fields.integer(-(2**31), 2**31 - 1, "must fit an int32")("priority", request.priority)
    if request.cache_salt is not None:
        fields.text(limits.MAX_CACHE_SALT_CHARACTERS)("cache_salt", request.cache_salt)
    if request.bypass_prefix_cache is not None:
        fields.boolean("bypass_prefix_cache", request.bypass_prefix_cache)
    if request.pooling is not None:
        _check_pooling(request)


def bad_word_ids(words: tuple[str, ...] | None, model: ModelLimits) -> tuple[tuple[int, ...], ...]:
    """Token sequences of bad_words."""
    if not words:
        return ()
    if model.encode_word is None:
        raise invalid(_path("bad_words"), words, "this model has no tokenizer to spell them with")
    return token_sequences(words, model.encode_word)


def truncate_prompt(params: SamplingParams, prompt_token_ids: list[int]) -> list[int]:
    """The last `truncate_prompt_tokens` ids, or all of them where it is unset."""
    keep = params.truncate_prompt_tokens
    if keep is None:
        return prompt_token_ids
    keep = fields.FIELDS["truncate_prompt_tokens"].read(_path("truncate_prompt_tokens"), keep)
    return prompt_token_ids[-keep:]


def generation_defaults(generation_config: Mapping[str, Any]) -> dict[str, float]:
    """The sampling values of a model's generation_config that fill unset fields; ValueError names a bad one.

    As vLLM does: `do_sample` is not looked at, so `do_sample: false` alone does not make greedy the default, and
    unknown keys count for nothing.  Its max_new_tokens is left out: unset max_tokens is what is left of the context.
    """
    defaults = {}
    for name in _DEFAULTABLE:
        if generation_config.get(name) is not None:
            try:
                defaults[name] = fields.FIELDS[name].read(f"generation_config.{name}", generation_config[name])
            except RequestError as error:
                raise ValueError(error.message) from None
    return defaults


def _path(name: str) -> str:
    return f"sampling_params.{name}"


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _read_fields(params: SamplingParams, model: ModelLimits) -> dict[str, Any]:
    """Each field read by its rule; None where neither the client nor the model set it."""
    asked = {}
    for field in dataclasses.fields(params):
        rule, value = fields.FIELDS[field.name], getattr(params, field.name)
        path, origin = _path(field.name), ""
        if value is None and field.name in _DEFAULTABLE:
            value, origin = model.generation_defaults.get(field.name), " (the model's generation_config sets it)"
        if value is None:
            asked[field.name] = None
            continue
        fields.refuse_empty(field.name, value, path)
        asked[field.name] = read = rule.read(path, value)
        if rule.token_ids is not None:
            _refuse_ids_beyond(model.vocab_size, path, rule.token_ids(read))
        if not rule.supported and read != rule.neutral:
            raise invalid(path, value, f"{field.name} is not supported yet{origin}")
    return asked


def _structured(asked: dict[str, Any]) -> StructuredOutput | None:
    """The one constraint on the output's form.  What would contradict it is refused."""
    given = [name for name in _STRUCTURED if asked[name]]
    if not given:
        return None
    if len(given) > 1:
        raise invalid(_path(given[1]), asked[given[1]], f"only one of {', '.join(_STRUCTURED)} may be set; so is {given[0]}")
    for name in _UNDEFINED_WITH_STRUCTURED:
        if asked[name]:
            raise invalid(_path(name), asked[name], f"has no meaning with {given[0]}, which alone decides which tokens "
                          "may come and when the output ends")
    return StructuredOutput(given[0], asked[given[0]])


def _refuse_ids_beyond(vocab_size: int, path: str, token_ids: Iterable[int]) -> None:
    """Readers have refused negative ids; how many there are is the model's to say."""
    for index, token_id in enumerate(token_ids):
        if token_id >= vocab_size:
            entry = f"{path} key" if isinstance(token_ids, Mapping) else f"{path}[{index}]"
            raise invalid(entry, token_id, f"must be in 0..{vocab_size - 1}, the model's vocabulary")


def _room_after_prompt(num_prompt_tokens: int, max_tokens: int | None, model: ModelLimits, field: str) -> int:
    """Tokens that may follow the prompt, or the refusal of a prompt that leaves no room or never fits."""
    context, asked = model.context_length, "unset" if max_tokens is None else max_tokens
    if num_prompt_tokens == 0:
        raise invalid(field, "0 tokens", "an empty prompt is refused; this model adds no BOS token to start from")
    if num_prompt_tokens > context:
        raise invalid(field, f"{num_prompt_tokens} tokens", f"exceeds the context of {context} tokens "
                      f"(max_tokens {asked})")
    if num_prompt_tokens == context and max_tokens != 0:
        raise invalid(field, f"{num_prompt_tokens} tokens",
                      f"leaves no room for output (max_tokens {asked}) in the context of {context} tokens")
    room = context - num_prompt_tokens
    if model.max_pool_tokens is not None:
        if num_prompt_tokens > model.max_pool_tokens:
            raise invalid(field, f"{num_prompt_tokens} tokens",
                          f"can never fit the KV pool, which holds {model.max_pool_tokens} tokens of one sequence")
        # The last token is never fed back, so it needs no place in the pool.
        room = min(room, model.max_pool_tokens - num_prompt_tokens + 1)
    return room


_REFUSED_WITH_BEAMS = (
    "best_of", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words", "json_schema", "json_object", "regex", "grammar",
    "choice",
)


def _check_beams(params: SamplingParams, beam_width: int, n: int, max_tokens: int, model: ModelLimits) -> None:
    for name in _REFUSED_WITH_BEAMS:
        value = getattr(params, name)
        if value is not None and value != () and value != {}:
            raise invalid(_path(name), value, f"must not be set with beam_width ({beam_width}): it takes the most probable sequences of the model as it is")
    if n > beam_width:
        raise invalid(_path("n"), n, f"must not be larger than beam_width ({beam_width})")
    if max_tokens == 0:
        raise invalid(_path("max_tokens"), max_tokens, f"must be at least 1 with beam_width ({beam_width})")
    if model.max_num_seqs is not None and beam_width > model.max_num_seqs:
        raise invalid(_path("beam_width"), beam_width, f"all beams run at once, and this server runs {model.max_num_seqs} sequences")


def _refuse_without_beams(asked: dict[str, Any]) -> None:
    for name in ("length_penalty", "early_stopping"):
        if asked[name] is not None and asked[name] != fields.FIELDS[name].neutral:
            raise invalid(_path(name), asked[name], "needs beam_width above 1")


def _check_group_fits(name: str, num_sequences: int, num_prompt_tokens: int, model: ModelLimits) -> None:
    """Sequences of one request share the prompt's blocks, all but the last one; together they must fit the pool."""
    if model.max_pool_tokens is None or num_sequences == 1:
        return
    num_blocks = model.max_pool_tokens // model.block_size
    needed = (num_prompt_tokens - 1) // model.block_size + num_sequences
    if needed > num_blocks:
        raise invalid(_path(name), num_sequences, f"{num_sequences} sequences after a prompt of {num_prompt_tokens} tokens "
                      f"need {needed} KV blocks of {model.block_size} tokens, the pool has {num_blocks}")


def _check_min_tokens(min_tokens: int, max_tokens: int | None, room: int, num_prompt_tokens: int, model: ModelLimits):
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid(_path("min_tokens"), min_tokens, f"must not be larger than max_tokens ({max_tokens})")
    if min_tokens > room:
        pool = "" if model.max_pool_tokens is None else f" and a KV pool of {model.max_pool_tokens}"
        raise invalid(_path("min_tokens"), min_tokens, f"only {room} tokens can follow a prompt of {num_prompt_tokens} "
                      f"in a context of {model.context_length}{pool}")


def _check_tokens_left(
    allowed: tuple[int, ...] | None, bad_words: tuple[tuple[int, ...], ...], banned: tuple[int, ...], model: ModelLimits
):
    """Refuses masks that may leave nothing to sample, wherever in the output it would happen."""
    if not (allowed or bad_words):
        return
    ends = {word[-1] for word in bad_words}
    candidates = (token_id for token_id in allowed or range(model.num_sampled_tokens))
    if any(one < model.num_sampled_tokens and one not in ends and one not in banned for one in candidates):
        return
    name, value = ("allowed_token_ids", list(allowed)) if allowed else ("bad_words", f"{len(bad_words)} sequences")
    raise invalid(_path(name), value, "together with bad_words, min_tokens and the tokenizer's vocabulary it leaves no "
                  "token to sample")


def _check_prompt(request: GenerateRequest, model: ModelLimits) -> None:
    given = [name for name in ("prompt", "prompt_token_ids", "messages") if getattr(request, name) is not None]
    if len(given) != 1:
        raise invalid("prompt", " and ".join(given) or "unset", "set exactly one of prompt, prompt_token_ids, messages")
    if request.prompt is not None:
        _check_prompt_text("prompt", request.prompt, request, model, may_be_empty=True)
    elif request.prompt_token_ids is not None:
        _check_prompt_token_ids(request.prompt_token_ids, model)
    else:
        _check_messages(request, model)
    if request.tools is not None and request.messages is None:
        raise invalid("tools", request.tools, "has no meaning without messages")
    if request.tools is not None:
        fields.each(_json_object, max_items=2**20)("tools", request.tools)


def _check_prompt_text(path: str, value: object, request: GenerateRequest, model: ModelLimits, may_be_empty: bool):
    """Text of a prompt or a message.  An empty prompt is `resolve`'s to refuse: a model may add BOS to it."""
    if not (may_be_empty and isinstance(value, str) and not value):
        fields.text()(path, value)
    longest = model.max_prompt_characters
    if longest is not None and len(value) > longest and request.sampling_params.truncate_prompt_tokens is None:
        raise invalid(path, value, f"{len(value)} characters cannot fit the context of {model.context_length} tokens")


def _check_prompt_token_ids(token_ids: object, model: ModelLimits) -> None:
    fields.each(lambda _, value: value, max_items=2**31 - 1)("prompt_token_ids", token_ids)
    if not token_ids:
        raise invalid("prompt_token_ids", [], "must not be empty")
    if set(map(type, token_ids)) == {int} and 0 <= min(token_ids) and max(token_ids) < model.vocab_size:
        return
    read = fields.integer(0, model.vocab_size - 1, f"must be in 0..{model.vocab_size - 1}, the model's vocabulary")
    for index, token_id in enumerate(token_ids):
        read(f"prompt_token_ids[{index}]", token_id)


def _check_messages(request: GenerateRequest, model: ModelLimits) -> None:
    fields.each(lambda _, value: value, max_items=2**20)("messages", request.messages)
    if not request.messages:
        raise invalid("messages", [], "must not be empty")
    for index, message in enumerate(request.messages):
        if not isinstance(message, Message):
            raise invalid(f"messages[{index}]", message, "must be a Message")
        fields.text(64)(f"messages[{index}].role", message.role)
        _check_prompt_text(f"messages[{index}].content", message.content, request, model, may_be_empty=True)
        for name in ("name", "tool_call_id"):
            if getattr(message, name) is not None:
                path = f"messages[{index}].{name}"
                _check_prompt_text(path, getattr(message, name), request, model, may_be_empty=True)
        if message.tool_calls is not None:
            fields.each(_json_object, max_items=2**20)(f"messages[{index}].tool_calls", message.tool_calls)


def _json_object(path: str, value: object) -> Mapping:
    if not isinstance(value, Mapping):
        raise invalid(path, value, f"must be an object, not {type(value).__name__}")
    return value


def _check_pooling(request: GenerateRequest) -> None:
    if not isinstance(request.pooling, Pooling):
        raise invalid("pooling", request.pooling, f"must be one of {', '.join(item.name for item in Pooling)}")
    if request.sampling_params != SamplingParams(max_tokens=0):
        raise invalid("pooling", request.pooling.name, "an embedding generates nothing: max_tokens must be 0, all else unset")


def _check_request_id(request_id: object) -> None:
    fields.text(limits.MAX_REQUEST_ID_CHARACTERS)("request_id", request_id)
    if not all("!" <= character <= "~" for character in request_id):
        raise invalid("request_id", request_id, "must be printable ASCII without spaces")
