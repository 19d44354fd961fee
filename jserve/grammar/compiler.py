"""JSON schemas, regular expressions, Lark and GBNF grammars and choices -> Grammar, or the refusal that says where it fails.

Compiling takes milliseconds and is bounded by llguidance's own counters (`LIMITS`), not by a clock; it releases the GIL,
so callers run it in a thread.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import llguidance
import numpy as np

from jserve.grammar.keywords import drop_annotations, unknown_keyword
from jserve.grammar.matcher import NOTHING_FITS, Matcher
from jserve.grammar.place import pattern_fault, place_in_gbnf, place_in_schema
from jserve.request import RequestError, StructuredOutput, invalid
from jserve.tokenizer import Tokenizer

LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, step_max_items=50_000, max_lexer_states=50_000,
    max_grammar_size=200_000, verbose_errors=False,
)
"""About 20 ms to compile and 15 ms a token at the very most; what needs more is refused, or ends its request."""
JSON_RULES = {"whitespace_pattern": r"[ \n\t]{0,16}", "lenient": False, "coerce_one_of": False}
"""Blanks between JSON's parts are the model's choice, but not without end; no keyword of a schema is ignored."""
_TRIAL_TOKENS = 6
_TRIAL_SHARES = (0.0, 0.5, 1.0)
NUM_KEPT = 64
MAX_SOURCE_CHARACTERS = 1_000_000


@dataclass(frozen=True)
class Grammar:
    """Compiled; `start` gives each output a place of its own."""

    field: str
    """The field of SamplingParams that asked for it."""
    _prototype: llguidance.LLMatcher
    _num_words: int

    def start(self) -> Matcher:
        return Matcher(self._prototype.deep_copy(), self._num_words)


class GrammarCompiler:
    """Compiles over one tokenizer and keeps the last few grammars; safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Iterable[int]):
        self._tokenizer = tokenizer
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._tokens: llguidance.LLTokenizer | None = None
        self._kept: OrderedDict[StructuredOutput, Grammar] = OrderedDict()

    def compile(self, asked: StructuredOutput) -> Grammar:
        """Raises RequestError that names the field and the place."""
        with self._lock:
            if asked in self._kept:
                self._kept.move_to_end(asked)
                return self._kept[asked]
        grammar = self._compile(asked)
        with self._lock:
            self._kept[asked] = grammar
            if len(self._kept) > NUM_KEPT:
                self._kept.popitem(last=False)
        return grammar

    def _compile(self, asked: StructuredOutput) -> Grammar:
        if not self._eos_token_ids:
            raise _refusal(asked, "the model has no EOS token, so the output could not end")
        source = _source(asked)
        prototype = llguidance.LLMatcher(self._token_table(), source, log_level=0, limits=LIMITS)
        if prototype.is_error():
            raise _refusal(asked, self._explain(prototype.get_error(), asked))
        first_mask = prototype.deep_copy()
        has_token = any(first_mask.compute_bitmask())
        error = first_mask.get_error() if first_mask.is_error() else _error_of_trial_walks(prototype)
        if not has_token or _is_dead(first_mask) or NOTHING_FITS in error:
            raise _refusal(asked, "no text satisfies it")
        if error:
            raise _refusal(asked, f"it needs too much work a token: {_one_line(error)}")
        return Grammar(asked.field, prototype, -(-self._tokenizer.vocab_size // 32))

    def _explain(self, error: str, asked: StructuredOutput) -> str:
        """llguidance's message in one line, with the place of the fault in what the client wrote."""
        fault = pattern_fault(error)
        if fault is not None and asked.field == "regex":
            return f"{fault.why}{fault.character(asked.value)}"
        if asked.field == "json_schema":
            place = place_in_schema(json.loads(asked.value), error, self._error_of_schema)
            where = "" if place is None else f" at {place}"
            return f"{_one_line(error)}{where}" if fault is None else f"{fault.why}{where},{fault.character()}"
        if fault is not None:
            error = error.replace(fault.text, f"{fault.why}{fault.character()} of the regex")
        return _one_line(error)

    def _error_of_schema(self, schema: object) -> str | None:
        try:
            source = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON_RULES)
        except ValueError as error:
            return str(error)
        matcher = llguidance.LLMatcher(self._token_table(), source, log_level=0, limits=LIMITS)
        return matcher.get_error() if matcher.is_error() else None

    def _token_table(self) -> llguidance.LLTokenizer:
        """Made when first needed: it takes a few tenths of a second."""
        with self._lock:
            if self._tokens is None:
                wrapped = _Tokens(self._tokenizer, self._eos_token_ids[0])
                self._tokens = llguidance.LLTokenizer(
                    wrapped, n_vocab=self._tokenizer.vocab_size, eos_token=self._eos_token_ids
                )
            return self._tokens


class _Tokens:
    """A Tokenizer as llguidance reads one."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int):
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = [one for one in range(tokenizer.vocab_size) if tokenizer.is_special(one)]

    def __call__(self, text: str | bytes) -> list[int]:
        text = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._tokenizer.encode(text, add_special=False, parse_special=False)


def _source(asked: StructuredOutput) -> str:
    """llguidance's own form of a grammar."""
    if asked.field != "choice" and isinstance(asked.value, str) and len(asked.value) > MAX_SOURCE_CHARACTERS:
        raise _refusal(asked, f"has {len(asked.value)} characters; at most {MAX_SOURCE_CHARACTERS} are allowed")
    match asked.field:
        case "json_schema":
            return _json_source(asked, _read_schema(asked))
        case "json_object":
            return _json_source(asked, {"type": "object"})
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(asked.value)
        case "choice":
            return llguidance.grammar_from("choice", json.dumps(asked.value, ensure_ascii=False))
        case "grammar":
            try:
                return llguidance.grammar_from("grammar", asked.value)
            except Exception as error:  # its GBNF reader raises what it likes
                where = place_in_gbnf(asked.value, str(error))
                raise _refusal(asked, f"neither Lark nor GBNF: {error}{where}") from None
    raise AssertionError(asked.field)


def _json_source(asked: StructuredOutput, schema: dict) -> str:
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON_RULES)
    except ValueError as error:
        raise _refusal(asked, str(error)) from None


def _read_schema(asked: StructuredOutput) -> dict:
    try:
        schema = json.loads(asked.value)
    except json.JSONDecodeError as error:
        raise _refusal(asked, f"not JSON at line {error.lineno} column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise _refusal(asked, "nested too deeply") from None
    if not isinstance(schema, dict | bool):
        raise _refusal(asked, "must be a JSON object or a boolean")
    if (unknown := unknown_keyword(schema)) is not None:
        raise _refusal(asked, unknown)
    drop_annotations(schema)
    if schema is False:
        raise _refusal(asked, "the schema false: no text satisfies it")
    return {} if schema is True else schema


def _error_of_trial_walks(prototype: llguidance.LLMatcher) -> str:
    """What stops the grammar within the first tokens of a few outputs, or nothing; what explodes mostly does so there.

    Each walk takes a token of another part of what is allowed.  At most a few tenths of a second, by LIMITS.
    """
    for share in _TRIAL_SHARES:
        state = prototype.deep_copy()
        for _ in range(_TRIAL_TOKENS):
            bits = np.frombuffer(state.compute_bitmask(), np.uint8)
            if state.is_error():
                return state.get_error()
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            if len(allowed) == 0:
                return NOTHING_FITS
            if not state.consume_token(int(allowed[int(share * (len(allowed) - 1))])):
                return state.get_error()
            if state.is_stopped():
                break
    return ""


def _is_dead(state: llguidance.LLMatcher) -> bool:
    """Stopped before its first token, neither satisfied nor for want of work."""
    return state.is_stopped() and not state.is_accepting() and not state.is_error()


def _one_line(error: str) -> str:
    # Its advice is about an option that would not keep what the schema says.
    message = re.sub(r"oneOf constraints are not supported\..*", "oneOf is supported where its cases cannot overlap", error)
    return " ".join(message.replace("<non-verbose/>", "").split())


def _refusal(asked: StructuredOutput, why: str) -> RequestError:
    return invalid(f"sampling_params.{asked.field}", asked.value, why[:400])
