"""The bytes that each token id stands for, read from how the tokenizer's decoder spells them.

Two spellings exist here: byte-level (GPT-2's alphabet, one character a byte) and SentencePiece's (`▁` for a blank,
`<0xE2>` for a byte).  Any other decoder is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class TokenizerError(ValueError):
    """A tokenizer cannot be built from what was given; the message names the file and the part."""


@dataclass(frozen=True)
class TokenTable:
    """What an id means: `token_bytes[i]` are the bytes of id i, b"" where the tokenizer has no such id."""

    token_bytes: Sequence[bytes]
    special_ids: frozenset[int]
    num_leading_blanks_dropped: int = 0
    """Blanks that a text loses at its start when decoded (SentencePiece's first token carries one that is not text)."""


@dataclass(frozen=True)
class Spelling:
    """How a decoder turns a token's string into bytes."""

    byte_level: bool
    replacement: str | None = None
    """The character that stands for a blank."""
    byte_fallback: bool = False
    num_leading_blanks_dropped: int = 0

    def bytes_of(self, token: str) -> bytes:
        if self.byte_level:
            spelled = token.translate(_BYTE_OF_CHARACTER)
            # A token with characters outside the alphabet is literal text (added tokens, mostly).
            return token.encode() if _LITERAL in spelled else spelled.encode("latin-1")
        if self.byte_fallback and _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return (token.replace(self.replacement, " ") if self.replacement else token).encode()


def byte_level_alphabet() -> dict[int, str]:
    """GPT-2's character for each byte: itself where printable in Latin-1, else one from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}


class _ByteOfCharacter(dict):
    """For str.translate: a byte as the Latin-1 character of its value, anything else as a mark."""

    def __missing__(self, character: int) -> str:
        return _LITERAL


_LITERAL = "\uffff"
_BYTE_OF_CHARACTER = _ByteOfCharacter({ord(char): chr(byte) for byte, char in byte_level_alphabet().items()})
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


def spelling_of(decoder: Mapping | None) -> Spelling:
    """The spelling that a tokenizer.json's `decoder` implies; TokenizerError names what is not built yet."""
    if decoder is None:
        raise TokenizerError("the tokenizer has no decoder, so its text could not be given back")
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Spelling(byte_level=True)
    replacement, blanks_dropped = None, 0
    for step in steps:
        match step:
            case {"type": "Metaspace", "replacement": str(character)}:
                replacement = character
                blanks_dropped = 0 if step.get("prepend_scheme") == "never" else 1
            case {"type": "Replace", "pattern": {"String": str(character)}, "content": " "}:
                replacement = character
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                blanks_dropped = start
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case _:
                raise TokenizerError(f"decoder {step['type']} ({' + '.join(kinds)}): not built yet")
    if replacement is None:
        raise TokenizerError(f"decoder {' + '.join(kinds)}: not built yet")
    return Spelling(
        byte_level=False,
        replacement=replacement,
        byte_fallback="ByteFallback" in kinds,
        num_leading_blanks_dropped=blanks_dropped,
    )


def build_table(
    tokens: Mapping[str, int], added: Mapping[int, str], special_ids: frozenset[int], spelling: Spelling
) -> TokenTable:
    """The table of a vocabulary.  Added tokens are literal text, whatever the spelling."""
    table = [b""] * (max([*tokens.values(), *added], default=-1) + 1)
    for token, token_id in tokens.items():
        table[token_id] = spelling.bytes_of(token)
    for token_id, literal in added.items():
        table[token_id] = literal.encode()
    return TokenTable(tuple(table), special_ids, spelling.num_leading_blanks_dropped)
