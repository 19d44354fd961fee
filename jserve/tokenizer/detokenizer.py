"""Token ids to text as they arrive: the joined pieces are exactly the text of all ids' bytes.

A character whose bytes are not all there waits; bytes that can no longer become one leave as U+FFFD at once.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from typing import Protocol

# Python's decoder waits for a third byte here, though UTF-8 has no character that begins so.
_HALF_OF_A_SURROGATE = re.compile(b"\xed[\xa0-\xbf]")


class TokenBytes(Protocol):
    """What is needed of a Tokenizer here."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


class Detokenizer:
    """The text of one output.

    Invariant: what push returned so far, then `_pending` decoded, is b"".join(bytes of all ids).decode("utf-8",
    "replace"), and `_pending` is empty or a proper beginning of one character (three bytes at most).
    """

    def __init__(self, tokenizer: TokenBytes, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._pending = b""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that is certain now.  Costs the new tokens only."""
        tokenizer = self._tokenizer
        if self._skip_special_tokens:
            token_ids = [token_id for token_id in token_ids if not tokenizer.is_special(token_id)]
        data = self._pending + b"".join(map(tokenizer.token_bytes, token_ids))
        text, num_decoded = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[num_decoded:]
        if _HALF_OF_A_SURROGATE.fullmatch(self._pending):
            text += self.finish()
        return text

    def finish(self) -> str:
        """The text of what still waits: U+FFFD for a character cut off, or nothing."""
        pending, self._pending = self._pending, b""
        return pending.decode("utf-8", "replace")


def decode_with_offsets(
    tokenizer, token_ids: Iterable[int], skip_special_tokens: bool
) -> tuple[str, list[tuple[int, int]]]:
    """The text as `Tokenizer.decode` gives it, and for each id the (start, end) characters that it brings.

    A character belongs to the id that completes it; what is cut off at the end, to the last id.
    """
    token_ids, ends = list(token_ids), [0]
    text, stream = tokenizer.decode(token_ids, skip_special_tokens), Detokenizer(tokenizer, skip_special_tokens)
    for token_id in token_ids:
        ends.append(ends[-1] + len(stream.push([token_id])))
    ends[-1] += len(stream.finish())
    num_dropped = ends[-1] - len(text)  # a text's first blank, which some tokenizers take for their own
    ends = [max(end - num_dropped, 0) for end in ends]
    return text, list(zip(ends, ends[1:]))
