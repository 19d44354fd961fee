"""A Tokenizer from a GGUF file's metadata: byte-level BPE vocabularies and their pre-tokenizers, and SentencePiece's.

The names of `tokenizer.ggml.pre` and what goes with each are llama.cpp's (src/llama-vocab.cpp); the expressions are
those of the tokenizer.json that each family was published with, of which llama.cpp's are adaptations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jserve.tokenizer.chat_template import ChatTemplate
from jserve.tokenizer.sentencepiece_pieces import CONTROL, NORMAL, UNUSED, USER_DEFINED, Pieces, backend_of, table_of
from jserve.tokenizer.token_table import Spelling, TokenizerError, TokenTable
from jserve.tokenizer.tokenizer import SpecialRules, Tokenizer

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before merging, and what else a `tokenizer.ggml.pre` implies."""

    expressions: tuple[str, ...]
    """Each cuts the pieces that the one before left, at its matches."""
    single_digits: bool = False
    """Every digit is a piece of its own, before the expressions."""
    composes: bool = False
    """Text is brought to NFC first."""
    ignore_merges: bool = False
    """A piece that is a token as a whole is taken whole."""
    adds_bos: bool = False
    """Where `tokenizer.ggml.add_bos_token` is missing."""


_LLAMA3_FAMILY = PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)
_DIGITS_GPT2 = PreTokenizer((_GPT2,), single_digits=True)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    # llama.cpp's own, for files that name none; no published tokenizer has it.
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,
    "llama3": _LLAMA3_FAMILY,
    "llama-v3": _LLAMA3_FAMILY,
    "llama-bpe": _LLAMA3_FAMILY,
    "falcon3": _LLAMA3_FAMILY,
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "dbrx": PreTokenizer((_LLAMA3,)),
    "qwen2": PreTokenizer((_QWEN2,), composes=True),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
}


def from_gguf(source: str | Path | Mapping[str, Any] | Any) -> Tokenizer:
    """The tokenizer of a GGUF: its path, its metadata as a mapping of plain values, or a `gguf.GGUFReader`.

    A mapping is quick; the `gguf` package needs seconds to open a file with a large vocabulary, so open it once.
    TokenizerError names the key that is missing or the kind that is not built yet.
    """
    fields = _fields(source)
    model = fields.get("tokenizer.ggml.model")
    if model == "llama":
        return _from_pieces(fields)
    if model != "gpt2":
        what = "it has none" if model is None else f"{model!r}: not built yet"
        raise TokenizerError(
            f"tokenizer.ggml.model = {what}; byte-level BPE ('gpt2') and SentencePiece BPE ('llama') are"
        )
    pre = fields.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise TokenizerError(f"tokenizer.ggml.pre = {pre!r}: not built yet; known: {', '.join(PRE_TOKENIZERS)}")
    tokens, types = _tokens_and_types(fields, "merges")
    rule = PRE_TOKENIZERS[pre]
    backend = _backend(tokens, types, fields["tokenizer.ggml.merges"], rule)
    rules = _special_rules(fields, rule.adds_bos, len(tokens))
    return Tokenizer(backend, _table(tokens, types), rules, _chat_template(fields, tokens))


def _from_pieces(fields: Mapping[str, Any]) -> Tokenizer:
    """llama.cpp's 'llama': SentencePiece BPE.  It puts a blank before every text that follows a control token."""
    tokens, types = _tokens_and_types(fields, "scores")
    scores = fields["tokenizer.ggml.scores"]
    if len(scores) != len(tokens):
        raise TokenizerError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    pieces = Pieces(tokens, scores, types, adds_prefix=fields.get("tokenizer.ggml.add_space_prefix", True))
    rules = _special_rules(fields, True, len(tokens))
    return Tokenizer(backend_of(pieces), table_of(pieces), rules, _chat_template(fields, tokens))


def _tokens_and_types(fields: Mapping[str, Any], needed: str) -> tuple[list[str], list[int]]:
    for key in ("tokenizer.ggml.tokens", f"tokenizer.ggml.{needed}"):
        if key not in fields:
            raise TokenizerError(f"{key} is missing in the GGUF")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types: list[int] = fields.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise TokenizerError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    return tokens, types


def _backend(tokens: list[str], types: list[int], merges: list[str], rule: PreTokenizer) -> tokenizers.Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens) if types[index] != UNUSED}
    # "left right"; a left side may itself begin with a blank in a vocabulary that is not quite byte-level.
    pairs = [(merge[:at], merge[at + 1 :]) for merge in merges if (at := merge.find(" ", 1)) > 0]
    try:
        model = models.BPE(vocabulary, pairs, ignore_merges=rule.ignore_merges)
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}") from None
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *([pre_tokenizers.Digits(individual_digits=True)] if rule.single_digits else []),
            *(pre_tokenizers.Split(Regex(expression), "isolated") for expression in rule.expressions),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if rule.composes:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [token for token, token_type in zip(tokens, types) if token_type == kind and token]
        backend.add_tokens([AddedToken(token, normalized=False, special=special) for token in added])
    return backend


def _table(tokens: list[str], types: list[int]) -> TokenTable:
    spelling = Spelling(byte_level=True)
    table = [
        b"" if token_type == UNUSED else spelling.bytes_of(token) if token_type == NORMAL else token.encode()
        for token, token_type in zip(tokens, types)
    ]
    while table and types[len(table) - 1] == UNUSED:  # padding of the embedding, no tokens
        table.pop()
    special_ids = frozenset(index for index, token_type in enumerate(types) if token_type == CONTROL)
    return TokenTable(tuple(table), special_ids)


def _special_rules(fields: Mapping[str, Any], adds_bos_by_default: bool, num_tokens: int) -> SpecialRules:
    def token_id(name: str) -> int | None:
        value = fields.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None and not 0 <= value < num_tokens:
            raise TokenizerError(f"tokenizer.ggml.{name}_token_id = {value}: there are {num_tokens} tokens")
        return value

    bos, eos = token_id("bos"), token_id("eos")
    adds_bos = fields.get("tokenizer.ggml.add_bos_token", adds_bos_by_default) and bos is not None
    adds_eos = fields.get("tokenizer.ggml.add_eos_token", False) and eos is not None
    # Chat models end a turn by eot (or eom, before a tool's answer), whatever eos says.
    ends = frozenset(end for end in (eos, token_id("eot"), token_id("eom")) if end is not None)
    return SpecialRules(bos, ends, (bos,) if adds_bos else (), (eos,) if adds_eos else ())


def _chat_template(fields: Mapping[str, Any], tokens: list[str]) -> ChatTemplate | None:
    source = fields.get("tokenizer.chat_template")
    if source is None:
        return None
    ids = {name: fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in _TEMPLATE_VARIABLES.items()}
    variables = {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}
    return ChatTemplate(source, variables, fields.get("tokenizer.chat_template.tool_use"))


_TEMPLATE_VARIABLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _fields(source) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    if isinstance(source, (str, Path)):
        import gguf  # slow to import, and not needed where the caller has read the file

        try:
            source = gguf.GGUFReader(source)
        except (OSError, ValueError, IndexError) as error:
            raise TokenizerError(f"{source} cannot be read as GGUF: {error}") from None
    return {name: field.contents() for name, field in source.fields.items() if name.startswith("tokenizer.")}
