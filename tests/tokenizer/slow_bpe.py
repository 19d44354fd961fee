"""Byte-pair encoding as its definition has it: slow, obvious, and independent of the `tokenizers` library."""

from collections.abc import Callable, Iterable

import pytest

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def encoder(fields: dict, expressions: list[str]) -> Callable[[str], list[int]]:
    """Text to ids with a GGUF's vocabulary; each expression cuts the pieces that the one before left."""
    regex = pytest.importorskip("regex")  # comes with transformers
    ids = {token: index for index, token in enumerate(fields["tokenizer.ggml.tokens"])}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(fields["tokenizer.ggml.merges"])}

    def encode(text: str) -> list[int]:
        pieces = [text]
        for expression in expressions:
            pieces = [part for piece in pieces for part in _cut(piece, regex.finditer(expression, piece))]
        # A byte that is no token is dropped before merging, so its neighbours can merge: what HF does.
        symbols = [[token for byte in piece.encode() if (token := ALPHABET[byte]) in ids] for piece in pieces]
        return [ids[token] for piece in symbols for token in _merge(piece, ranks)]

    return encode


def _cut(piece: str, matches: Iterable) -> list[str]:
    parts, done = [], 0
    for match in matches:
        parts += [piece[done : match.start()], match.group()]
        done = match.end()
    return [part for part in [*parts, piece[done:]] if part]


def _merge(symbols: list[str], ranks: dict) -> list[str]:
    while True:
        pairs = list(zip(symbols, symbols[1:]))
        best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)), default=None)
        if best not in ranks:
            return symbols
        at = pairs.index(best)
        symbols[at : at + 2] = ["".join(best)]


def _alphabet() -> list[str]:
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


ALPHABET = _alphabet()
