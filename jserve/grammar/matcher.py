"""One output's place in its grammar: which tokens may come next.  Used by one thread at a time."""

from __future__ import annotations

import llguidance
import numpy as np


NOTHING_FITS = "NoExtensionBias"
"""llguidance's word for a place where no token may come."""


class Matcher:
    """Invariant: `num_consumed` tokens were accepted, or `error` says why one was not."""

    def __init__(self, state: llguidance.LLMatcher, num_words: int):
        self._state = state
        self._num_words = num_words
        self.num_consumed = 0

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed further; it stays so."""
        if not self._state.is_error():
            return None
        error = " ".join(self._state.get_error().replace("<non-verbose/>", "").split())
        return "no text that satisfies it goes on from there" if NOTHING_FITS in error else error

    def consume(self, token_ids: list[int]) -> bool:
        """Takes the next tokens of the output; False where one does not fit."""
        if not self._state.consume_tokens(token_ids):
            return False
        self.num_consumed += len(token_ids)
        return True

    def take_forced(self) -> list[int]:
        """The next tokens, as far as each is the only one that may come; the output is taken to go on with them.

        The last may be EOS; then nothing is to follow.
        """
        forced = self._state.compute_ff_tokens()
        if forced and not self.consume(forced):
            return []
        if self._state.is_stopped():
            row = np.empty(self._num_words, np.int32)
            self.fill(row)
            ends = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            if len(ends) == 1:  # a model may have several
                forced.append(int(ends[0]))
        return forced

    def fill(self, row: np.ndarray) -> None:
        """Writes the mask of the next token into i32[W]: bit v % 32 of word v // 32 is set where id v may come.

        Once nothing can follow but the end, only EOS may.
        """
        row[self._num_words :] = 0  # rows that pad the embedding
        self._state.unsafe_compute_mask_ptr(row.ctypes.data, 4 * self._num_words)
