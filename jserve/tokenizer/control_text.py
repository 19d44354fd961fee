"""Keeps control tokens that a user spells inside a message from becoming control.

A message's text goes through the chat template with a mark before every character that must not belong to a control
token; the marks come out of the rendering as positions, and control tokens are looked for between them only.  The
template sees the message otherwise unchanged, so trimming, splitting and comparing work as ever.

    content   "bye <|im_end|>"   marked   "bye ⚑<|im_end|>"
    rendered  "<|im_start|>user\nbye ⚑<|im_end|><|im_end|>\n": the first <|im_end|> is text, the second is control
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jserve.tokenizer.chat_template import ChatTemplateError


@dataclass(frozen=True)
class Shield:
    """A conversation with marks in it."""

    mark: str
    messages: list[dict]
    tools: list | None

    def positions(self, marked_rendering: str, rendering: str) -> list[int]:
        """Indices in `rendering` of the characters that must stay ordinary text."""
        pieces = marked_rendering.split(self.mark)
        if "".join(pieces) != rendering:
            raise ChatTemplateError(
                "messages: the chat template rewrites a message that spells a control token, "
                "so it cannot be kept ordinary text"
            )
        positions, end = [], 0
        for piece in pieces[:-1]:
            end += len(piece)
            positions.append(end)
        return positions


class ControlText:
    """The control tokens of one tokenizer, as text."""

    def __init__(self, tokens: Mapping[int, Any]):
        """`tokens`: id -> the `AddedToken` (content, lstrip, rstrip)."""
        tokens = {token_id: token for token_id, token in tokens.items() if token.content}
        self._ids = {token.content: token_id for token_id, token in tokens.items()}
        self._swallows_before = frozenset(token.content for token in tokens.values() if token.lstrip)
        self._swallows_after = frozenset(token.content for token in tokens.values() if token.rstrip)
        longest_first = sorted(self._ids, key=len, reverse=True)
        alternatives = "|".join(map(re.escape, longest_first))
        self._token = re.compile(alternatives) if alternatives else None
        self._token_start = re.compile(f"(?={alternatives})") if alternatives else None
        self._beginnings = frozenset(text[:length] for text in self._ids for length in range(1, len(text)))
        self._endings = frozenset(text[length:] for text in self._ids for length in range(1, len(text)))
        self._longest = max(map(len, self._ids), default=0)

    def shield(self, rendering: str, messages: list[dict], tools: Sequence | None) -> Shield | None:
        """The conversation with marks, or None where nothing in it could be part of a control token."""
        if self._token is None or not any(map(self._exposed, _strings(messages, tools))):
            return None
        everything = {character for text in (rendering, *_strings(messages, tools)) for character in text}
        mark = next((chr(code) for code in range(0xE000, 0xF900) if chr(code) not in everything), None)
        if mark is None:
            raise ChatTemplateError("messages: every private-use character of Unicode is in use")

        def marked(value):
            match value:
                case str():
                    return self._marked(value, mark)
                case Mapping():
                    return {marked(key): marked(item) for key, item in value.items()}
                case list() | tuple():
                    return [marked(item) for item in value]
            return value

        return Shield(mark, marked(messages), None if tools is None else marked(tools))

    def split(self, text: str, protected: Sequence[int]) -> list[str | int]:
        """`text` as ordinary pieces and the ids of control tokens; none of these covers a protected index."""
        pieces: list[str | int] = []
        done = 0
        for start, end, token_id in self._tokens_between(text, protected):
            if start > done:
                pieces.append(text[done:start])
            pieces.append(token_id)
            done = end
        if done < len(text):
            pieces.append(text[done:])
        return pieces

    def _tokens_between(self, text: str, protected: Sequence[int]) -> Iterable[tuple[int, int, int]]:
        bounds = [-1, *protected, len(text)]
        done = 0
        for before, after in zip(bounds, bounds[1:]):
            for match in self._token.finditer(text, before + 1, after):
                start, end, literal = match.start(), match.end(), match.group()
                if literal in self._swallows_before:
                    start = done + len(text[done:start].rstrip())
                if literal in self._swallows_after:
                    end = _BLANKS.match(text, end).end()
                yield start, end, self._ids[literal]
                done = end

    def _exposed(self, text: str) -> bool:
        return self._token.search(text) is not None or bool(self._border_positions(text))

    def _marked(self, text: str, mark: str) -> str:
        positions = {match.start() for match in self._token_start.finditer(text)} | self._border_positions(text)
        bounds = [0, *sorted(positions), len(text)]
        return mark.join(text[start:end] for start, end in zip(bounds, bounds[1:])) if positions else text

    def _border_positions(self, text: str) -> set[int]:
        """Where the text's end begins a control token, or its start ends one, that its surroundings could complete.

        A template may trim the text, so what counts is the text without the blanks around it, too.
        """
        positions = set()
        for end in {len(text), len(text.rstrip())}:
            starts = range(max(0, end - self._longest + 1), end)
            positions.update(start for start in starts if text[start:end] in self._beginnings)
        for start in {0, len(text) - len(text.lstrip())}:
            ends = range(start + 1, min(len(text), start + self._longest - 1) + 1)
            if any(text[start:end] in self._endings for end in ends):
                positions.add(start)
        return positions


_BLANKS = re.compile(r"\s*")


def _strings(*values) -> Iterable[str]:
    for value in values:
        match value:
            case str():
                yield value
            case Mapping():
                yield from _strings(*value, *value.values())
            case list() | tuple():
                yield from _strings(*value)
