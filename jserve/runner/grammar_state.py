"""Grammars of the running sequences by slot, and each step's masks.

The mask of token N + 1 needs token N, which the device may still be sampling when the step is launched.  So the forward
pass and the LM head start first; while they run, the host waits for step N, advances the grammars and fills the masks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jserve.grammar import Matcher
from jserve.request import Code, RequestError
from jserve.sampling.shaping import num_words
from jserve.scheduler.plan import StepPlan
from jserve.scheduler.sequence import Sequence


class GrammarState:
    """One matcher a slot that has a grammar."""

    def __init__(self, num_slots: int, vocab_size: int):
        self._num_words = num_words(vocab_size)
        self._matchers: list[Matcher | None] = [None] * num_slots
        self._is_used = np.zeros(num_slots, bool)

    def enter(self, sequence: Sequence) -> None:
        """Takes over a sequence that entered its slot; one that comes back follows its own output again."""
        grammar = sequence.sampling.grammar
        matcher = None if grammar is None else grammar.start()
        if matcher is not None and sequence.num_output:
            matcher.consume(sequence.tokens[sequence.num_prompt : sequence.num_known].tolist())
        self._matchers[sequence.slot] = matcher
        self._is_used[sequence.slot] = matcher is not None

    def masks(
        self, plan: StepPlan, num_rows: int, token_in_flight: Callable[[int], int]
    ) -> tuple[np.ndarray | None, dict[int, RequestError]]:
        """(i32[num_rows, W] allowed bits of the plan's sampling rows or None, errors of those that cannot go on).

        Args:
          token_in_flight: of a plan's row, the id that its slot has sampled and the host has not applied.
        """
        rows = plan.sampling_rows
        if not self._is_used[plan.slots[rows]].any():
            return None, {}
        bits = np.full((num_rows, self._num_words), -1, np.int32)
        errors = {}
        for at, row in enumerate(rows.tolist()):
            matcher = self._matchers[plan.slots[row]]
            if matcher is None:
                continue
            sequence, num_before = plan.sequences[row], int(plan.output_index[row])
            new = sequence.tokens[sequence.num_prompt + matcher.num_consumed : sequence.num_known].tolist()
            if matcher.num_consumed + len(new) < num_before:
                new.append(token_in_flight(row))
            if matcher.error is None:
                matcher.consume(new)
            if matcher.error is None:
                matcher.fill(bits[at])
            if matcher.error is not None:
                errors[at] = _cannot_go_on(sequence, num_before, matcher.error)
        return bits, errors


def _cannot_go_on(sequence: Sequence, num_tokens: int, why: str) -> RequestError:
    """Its grammar needs more work for a token than the limits allow."""
    field = f"sampling_params.{sequence.sampling.grammar.field}"
    return RequestError(
        Code.INVALID_ARGUMENT, f"{field}: the grammar cannot be followed after {num_tokens} tokens: {why}", field=field
    )
