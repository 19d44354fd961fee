"""A SentencePiece vocabulary of kind BPE (Llama 2, TinyLlama, Mistral) as an HF `tokenizers` object.

SentencePiece joins the neighbours whose joined piece has the best score; here every way to cut a piece in two is a
merge, ranked by the piece's score, which comes to the same.  `sentencepiece_model` and `gguf_vocabulary` read files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jserve.tokenizer.token_table import Spelling, TokenizerError, TokenTable

# Types of pieces, in SentencePiece's files and in GGUF alike.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

BLANK = "▁"
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class Pieces:
    texts: Sequence[str]
    """By id."""
    scores: Sequence[float]
    types: Sequence[int]
    adds_prefix: bool = True
    """A text gets a blank in front."""
    prefix_at_start_only: bool = False
    """Not so a text that follows a control token (HF's `legacy` false)."""
    removes_extra_blanks: bool = False
    """Blanks at both ends vanish, and of several in a row all but one."""
    characters: bytes = b""
    """SentencePiece's compiled table of characters to replace (NFKC and such)."""


def backend_of(pieces: Pieces) -> tokenizers.Tokenizer:
    """TokenizerError where the pieces do not make a vocabulary."""
    vocabulary = {text: index for index, text in enumerate(pieces.texts) if pieces.types[index] != UNUSED}
    unknown = next((text for text, kind in zip(pieces.texts, pieces.types) if kind == UNKNOWN), None)
    bytes_there = [text for text, kind in zip(pieces.texts, pieces.types) if kind == BYTE]
    if bytes_there and (len(bytes_there) != 256 or not all(map(_BYTE_PIECE.fullmatch, bytes_there))):
        raise TokenizerError(f"{len(bytes_there)} byte pieces, such as {bytes_there[0]!r}; expected <0x00> to <0xFF>")
    try:
        model = models.BPE(
            vocabulary, _merges(pieces), unk_token=unknown, fuse_unk=True, byte_fallback=bool(bytes_there)
        )
        backend = tokenizers.Tokenizer(model)
        backend.normalizer = normalizers.Sequence(_normalizers(pieces))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"the SentencePiece vocabulary cannot be used: {error}") from None
    if pieces.adds_prefix and pieces.prefix_at_start_only:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=BLANK, prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(" ", 1, 0)] if pieces.adds_prefix else [])
    )
    for kinds, special in (((UNKNOWN, CONTROL), True), ((USER_DEFINED,), False)):
        added = [text for text, kind in zip(pieces.texts, pieces.types) if kind in kinds and text]
        backend.add_tokens([AddedToken(_shown(text), normalized=False, special=special) for text in added])
    return backend


def table_of(pieces: Pieces) -> TokenTable:
    num_real = len(pieces.texts)
    while num_real and pieces.types[num_real - 1] == UNUSED:  # padding of the embedding, no tokens
        num_real -= 1
    spelling = Spelling(byte_level=False, replacement=BLANK)
    fallback = Spelling(byte_level=False, byte_fallback=True)

    def bytes_of(text: str, kind: int) -> bytes:
        if kind == UNUSED:
            return b""
        return fallback.bytes_of(text) if kind == BYTE else spelling.bytes_of(text)

    return TokenTable(
        tuple(bytes_of(text, kind) for text, kind in zip(pieces.texts[:num_real], pieces.types)),
        frozenset(index for index, kind in enumerate(pieces.types) if kind in (UNKNOWN, CONTROL)),
        num_leading_blanks_dropped=int(pieces.adds_prefix),
    )


def _merges(pieces: Pieces) -> list[tuple[str, str]]:
    """(left, right) of every piece that two pieces make, best score first.  Only ordinary pieces are ever joined."""
    scores = {
        text: score for text, score, kind in zip(pieces.texts, pieces.scores, pieces.types) if kind == NORMAL and text
    }
    ranked = sorted(scores, key=lambda text: -scores[text])
    return [
        (text[:at], text[at:])
        for text in ranked
        for at in range(1, len(text))
        if text[:at] in scores and text[at:] in scores
    ]


def _normalizers(pieces: Pieces) -> list[normalizers.Normalizer]:
    steps: list[normalizers.Normalizer] = []
    if pieces.characters:
        steps.append(normalizers.Precompiled(pieces.characters))
    if pieces.removes_extra_blanks:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if pieces.adds_prefix and not pieces.prefix_at_start_only:
        steps.append(normalizers.Prepend(BLANK))
    if not (pieces.adds_prefix and pieces.prefix_at_start_only):
        steps.append(normalizers.Replace(" ", BLANK))
    return steps


def _shown(text: str) -> str:
    return text.replace(BLANK, " ")
