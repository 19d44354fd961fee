"""One row per field of SamplingParams: how it is read, which value has no effect, and whether this build serves it.

Readers check type, range and size, and return the value in its plain Python type.  GetModelInfo shows `SUPPORTED`;
switching a field on is its `supported=True` here, its place in `validate.resolve`, and the code that serves it.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jserve.request import EarlyStopping, invalid
from jserve.sampling import limits

_FLOAT32_MAX = 3.4028234663852886e38

Reader = Callable[[str, object], Any]


@dataclass(frozen=True)
class FieldRule:
    """How one field is treated."""

    read: Reader
    supported: bool
    neutral: object = None
    """The value that asks for nothing, accepted also where unsupported."""
    token_ids: Callable[[Any], Iterable[int]] | None = None
    """The ids in a value that was read; the validator refuses those outside the model's vocabulary."""
    may_be_empty: bool = True
    """Whether an empty list asks for nothing; of a list of what may come it would ask for the impossible."""


def integer(low: int, high: int, why: str | None = None) -> Reader:
    """Reads an int in [low, high]; a bool or a float is refused."""
    why = why or f"must be in {low}..{high}"

    def read(path: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise invalid(path, value, f"must be an integer, not {type(value).__name__}")
        value = int(value)
        if not low <= value <= high:
            # Python refuses to print an integer of more than 4,300 digits.
            shown = value if value.bit_length() <= 128 else f"{value.bit_length()} bits"
            raise invalid(path, shown, why if value < low or str(high) in why else f"{why}, and at most {high}")
        return value

    return read


def real(accept: Callable[[float], bool], why: str) -> Reader:
    """Reads a float that is finite in float32 and accepted; an int is one, a bool is not; -0.0 becomes 0.0."""

    def read(path: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise invalid(path, value, f"must be a number, not {type(value).__name__}")
        try:
            number = float(value)
        except OverflowError:
            raise invalid(path, "a number beyond float64", why) from None
        if not math.isfinite(number) or abs(number) > _FLOAT32_MAX or not accept(number):
            raise invalid(path, value, why)
        return number + 0.0

    return read


def boolean(path: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise invalid(path, value, f"must be true or false, not {type(value).__name__}")
    return value


def text(max_characters: int | None = None) -> Reader:
    """Reads a non-empty string that UTF-8 can encode (a lone surrogate cannot be)."""

    def read(path: str, value: object) -> str:
        if not isinstance(value, str):
            raise invalid(path, value, f"must be a string, not {type(value).__name__}")
        if not value:
            raise invalid(path, value, "must not be empty")
        if max_characters is not None and len(value) > max_characters:
            raise invalid(path, value, f"has {len(value)} characters; at most {max_characters} are allowed")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise invalid(path, value, f"is not valid Unicode at character {error.start}") from None
        return value

    return read


def each(read_item: Reader, max_items: int, one_string: bool = False) -> Reader:
    """Reads a list of at most `max_items`; with `one_string` a bare string counts as a list of itself."""

    def read(path: str, value: object) -> tuple:
        if one_string and isinstance(value, str):
            value = (value,)
        if isinstance(value, str | bytes) or not isinstance(value, Sequence | set | frozenset):
            raise invalid(path, value, f"must be a list, not {type(value).__name__}")
        if len(value) > max_items:
            raise invalid(path, f"{len(value)} entries", f"at most {max_items} are allowed")
        return tuple(read_item(f"{path}[{index}]", item) for index, item in enumerate(value))

    return read


def biases(path: str, value: object) -> tuple[tuple[int, float], ...]:
    """Reads a map of token id to bias in [-100, 100]; sorted by id."""
    if not isinstance(value, Mapping):
        raise invalid(path, value, f"must be a map of token id to bias, not {type(value).__name__}")
    if len(value) > limits.MAX_LOGIT_BIASES:
        raise invalid(path, f"{len(value)} entries", f"at most {limits.MAX_LOGIT_BIASES} are allowed")
    read_bias = real(lambda bias: -100 <= bias <= 100, "must be a finite number in [-100, 100]")
    return tuple(sorted((_TOKEN_ID(f"{path} key", token_id), read_bias(f"{path}[{token_id}]", bias))
                        for token_id, bias in value.items()))


def early_stopping(path: str, value: object) -> EarlyStopping:
    if not isinstance(value, EarlyStopping):
        raise invalid(path, value, f"must be one of {', '.join(item.name for item in EarlyStopping)}")
    return value


_TOKEN_ID = integer(0, 2**31 - 1, "must be a token id: 0 or larger, and inside the vocabulary")
_SEQUENCES = integer(1, limits.MAX_SEQUENCES_PER_REQUEST)
_LOGPROBS = integer(0, limits.MAX_LOGPROBS)
_COUNT = integer(0, 2**63 - 1, "must be 0 or larger")
_PENALTY = real(lambda penalty: -2 <= penalty <= 2, "must be a finite number in [-2, 2]")

FIELDS: Mapping[str, FieldRule] = MappingProxyType({
    "n": FieldRule(_SEQUENCES, supported=True),
    "best_of": FieldRule(_SEQUENCES, supported=True),
    "beam_width": FieldRule(_SEQUENCES, supported=True),
    "length_penalty": FieldRule(real(lambda p: abs(p) <= 100, "must be in [-100, 100]"), supported=True, neutral=1.0),
    "early_stopping": FieldRule(early_stopping, supported=True, neutral=EarlyStopping.HEURISTIC),
    "temperature": FieldRule(real(lambda t: t >= 0, "must be finite in float32 and 0 (greedy) or larger"), supported=True),
    "top_p": FieldRule(real(lambda p: 0 < p <= 1, "must be in (0, 1]"), supported=True),
    "top_k": FieldRule(integer(-1, 2**63 - 1, "must be -1 or 0 (off) or larger"), supported=True),
    "min_p": FieldRule(real(lambda p: 0 <= p <= 1, "must be in [0, 1]"), supported=True),
    "seed": FieldRule(integer(-(2**63), 2**63 - 1, "must fit an int64"), supported=True),
    "max_tokens": FieldRule(_COUNT, supported=True),
    "min_tokens": FieldRule(_COUNT, supported=True),
    "stop": FieldRule(each(text(limits.MAX_STOP_STRING_CHARACTERS), limits.MAX_STOP_STRINGS, one_string=True),
                      supported=True),
    "stop_token_ids": FieldRule(each(_TOKEN_ID, limits.MAX_STOP_TOKEN_IDS), supported=True, token_ids=tuple),
    "include_stop_str_in_output": FieldRule(boolean, supported=True),
    "ignore_eos": FieldRule(boolean, supported=True),
    # Beyond these bounds x / penalty and x * penalty leave float32; nobody asks for them.
    "repetition_penalty": FieldRule(real(lambda r: 0.01 <= r <= 100, "must be in [0.01, 100]"), supported=True),
    "presence_penalty": FieldRule(_PENALTY, supported=True),
    "frequency_penalty": FieldRule(_PENALTY, supported=True),
    "logit_bias": FieldRule(biases, supported=True, token_ids=dict),
    "allowed_token_ids": FieldRule(each(_TOKEN_ID, limits.MAX_ALLOWED_TOKEN_IDS), supported=True, token_ids=tuple,
                                   may_be_empty=False),
    "bad_words": FieldRule(each(text(limits.MAX_BAD_WORD_CHARACTERS), limits.MAX_BAD_WORDS), supported=True),
    "logprobs": FieldRule(_LOGPROBS, supported=True),
    "prompt_logprobs": FieldRule(_LOGPROBS, supported=True),
    "skip_special_tokens": FieldRule(boolean, supported=True),
    "truncate_prompt_tokens": FieldRule(integer(1, 2**63 - 1, "must be 1 or larger"), supported=True),
    "json_schema": FieldRule(text(), supported=True),
    "json_object": FieldRule(boolean, supported=True),
    "regex": FieldRule(text(), supported=True),
    "grammar": FieldRule(text(), supported=True),
    "choice": FieldRule(each(text(), limits.MAX_CHOICES), supported=True, may_be_empty=False),
})

def refuse_empty(name: str, value: object, path: str) -> None:
    """Where a list must not be empty.  Front ends that cannot tell an empty list from an unset one say so first."""
    if not FIELDS[name].may_be_empty and isinstance(value, Sized) and not len(value):
        raise invalid(path, [], "must not be empty: it lists what may come")


SUPPORTED: Mapping[str, bool] = MappingProxyType({name: rule.supported for name, rule in FIELDS.items()})
"""What GetModelInfo lists as capabilities: every field of SamplingParams and whether it may be set."""
