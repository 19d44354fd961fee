"""Stop strings over streamed text: matched across token borders, and no text sent that a match would take back.

The first match is the one that completes first in the text, and of those that complete at the same character the
longest; so the result does not depend on how the text was cut into tokens or steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from jserve.tokenizer.detokenizer import Detokenizer


@dataclass(frozen=True)
class TextPiece:
    """What a push of token ids brought."""

    text: str
    """Text that is certain now."""
    num_tokens_used: int
    """How many of the pushed ids belong to the output: up to and including the one that completed a match, else all."""
    matched_stop: str | None = None


class TextStream:
    """Token ids of one output in, text with stop strings applied out."""

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str] = (), include: bool = False, min_tokens: int = 0
    ):
        """`include` keeps the stop string's, stop id's or EOS's text; a stop string counts only when it is completed
        by a token after the first `min_tokens`."""
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops, include)
        self._has_stops = bool(stops)
        self._include = include
        self._min_tokens = min_tokens
        self._num_tokens = 0

    def push(self, token_ids: Sequence[int], *, ended: bool = False) -> TextPiece:
        """Takes the next ids.  `ended`: the last of them is the EOS or stop id that ends the output; its text is shown
        only with `include`, and completes no stop string.  After a match, take no more ids."""
        visible = token_ids[:-1] if ended else token_ids
        texts = []
        if not self._has_stops:
            texts.append(self._detokenizer.push(visible))
            self._num_tokens += len(visible)
            visible = ()
        for index, token_id in enumerate(visible):
            self._num_tokens += 1
            counts = self._num_tokens > self._min_tokens
            text, stop = self._matcher.push(self._detokenizer.push((token_id,)), counts=counts)
            texts.append(text)
            if stop is not None:
                return TextPiece("".join(texts), index + 1, stop)
        if ended:
            self._num_tokens += 1
            if self._include:
                texts.append(self._matcher.push(self._detokenizer.push(token_ids[-1:]), counts=False)[0])
        return TextPiece("".join(texts), len(token_ids))

    def finish(self) -> str:
        """What is still held back, after an end that no stop string made; nothing after a match."""
        if self._matcher.matched is not None:
            return ""
        return self._matcher.finish() + self._detokenizer.finish()


class StopMatcher:
    """Finds the first stop string in a text that comes in pieces.

    Invariant: `_held` is the longest end of the text so far that is a proper beginning of a stop string; the rest has
    been released.
    """

    def __init__(self, stops: Sequence[str], include: bool = False):
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self.matched: str | None = None
        self._include = include
        self._automaton = _Automaton(stops)
        self._node = 0
        self._held = ""

    def push(self, text: str, *, counts: bool = True) -> tuple[str, str | None]:
        """Text now safe to release, and the stop string that `text` completed, or None.  With counts=False a stop
        string completed by `text` is ordinary text."""
        if self.matched is not None:
            return "", self.matched
        automaton, node = self._automaton, self._node
        for index, character in enumerate(text):
            node = automaton.step(node, character)
            stop = automaton.stop_at[node]
            if stop is not None and counts:
                seen = self._held + text[: index + 1]
                self.matched, self._held = stop, ""
                return (seen if self._include else seen[: -len(stop)]), stop
        self._node = node
        seen = self._held + text
        certain = len(seen) - automaton.num_held_at[node]
        self._held = seen[certain:]
        return seen[:certain], None

    def finish(self) -> str:
        """The text still held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """Aho and Corasick, 1975: each node is a beginning of a stop string, the longest that the text ends with."""

    def __init__(self, stops: Sequence[str]):
        self._children: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self.stop_at: list[str | None] = [None]
        """The longest stop string that the text ends with, by node."""
        self.num_held_at = [0]
        """Length of the longest proper beginning of a stop string that the text ends with, by node."""
        for stop in stops:
            self._insert(stop)
        self._link()

    def step(self, node: int, character: str) -> int:
        while (following := self._children[node].get(character)) is None:
            if node == 0:
                return 0
            node = self._fallback[node]
        return following

    def _insert(self, stop: str) -> None:
        node = 0
        for depth, character in enumerate(stop, 1):
            following = self._children[node].get(character)
            if following is None:
                following = len(self._children)
                self._children[node][character] = following
                self._children.append({})
                self._fallback.append(0)
                self.stop_at.append(None)
                self.num_held_at.append(depth)
            node = following
        self.stop_at[node] = stop

    def _link(self) -> None:
        """Fallbacks by breadth, so that a node's are done before its children's."""
        waiting = deque(self._children[0].values())
        while waiting:
            node = waiting.popleft()
            fallback = self._fallback[node]
            for character, child in self._children[node].items():
                self._fallback[child] = self.step(fallback, character)
                waiting.append(child)
            if self.stop_at[node] is None:
                self.stop_at[node] = self.stop_at[fallback]
            if not self._children[node]:  # a whole stop string, no proper beginning of another
                self.num_held_at[node] = self.num_held_at[fallback]
