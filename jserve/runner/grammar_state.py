"""Grammars of the running sequences by slot, and each step's masks.

The mask of token N + 1 needs token N, which the device may still be sampling when the step is launched.  So the forward
pass and the LM head start first; while they run, the host waits for step N, advances the grammars and fills the masks.
Where a grammar leaves no choice, the tokens that must come are found here too, so that they need no step each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from jserve.grammar import Matcher
from jserve.request import Code, RequestError
from jserve.sampling.shaping import num_words
from jserve.scheduler.plan import StepPlan
from jserve.scheduler.sequence import Sequence


@dataclass
class GrammarMasks:
    """Of one step; rows are those that sample, by their place."""

    bits: np.ndarray | None = None  # i32[num_rows, W] allowed ids; None: no row has a grammar
    errors: dict[int, RequestError] = field(default_factory=dict)
    """Of rows that cannot go on."""
    forced: dict[int, list[int]] = field(default_factory=dict)
    """The id that a row samples and those that must follow it, where both are certain."""


class GrammarState:
    """One matcher a slot that has a grammar.

    Args:
      jumps: look for forced tokens.
    """

    def __init__(self, num_slots: int, vocab_size: int, jumps: bool = True):
        self._jumps = jumps
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

    def masks(self, plan: StepPlan, num_rows: int, token_in_flight: Callable[[int], int]) -> GrammarMasks:
        """Follows the outputs up to the tokens that this plan samples.

        Args:
          token_in_flight: of a plan's row, the id that its slot has sampled and the host has not applied.
        """
        rows = plan.sampling_rows
        if not self._is_used[plan.slots[rows]].any():
            return GrammarMasks()
        masks = GrammarMasks(np.full((num_rows, self._num_words), -1, np.int32))
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
                matcher.fill(masks.bits[at])
            may_jump = self._jumps and sequence.sampling.may_jump
            if may_jump and matcher.error is None and _has_one_bit(masks.bits[at]):
                forced = up_to_the_end(matcher.take_forced(), sequence, num_before)
                if len(forced) > 1 or not sequence.stop_ids.isdisjoint(forced):
                    masks.forced[at] = forced
            if matcher.error is not None:
                masks.errors[at] = _cannot_go_on(sequence, num_before, matcher.error)
        return masks


def _has_one_bit(row: np.ndarray) -> bool:
    [words] = row.nonzero()
    return len(words) == 1 and int(row[words[0]]).bit_count() == 1


def up_to_the_end(forced: list[int], sequence: Sequence, num_before: int) -> list[int]:
    """As much of it as the output still takes after `num_before` tokens."""
    forced = forced[: sequence.limit - sequence.num_prompt - num_before]
    end = next((at for at, token_id in enumerate(forced, 1) if token_id in sequence.stop_ids), len(forced))
    return forced[:end]


def _cannot_go_on(sequence: Sequence, num_tokens: int, why: str) -> RequestError:
    """Its grammar needs more work for a token than the limits allow."""
    field = f"sampling_params.{sequence.sampling.grammar.field}"
    return RequestError(
        Code.INVALID_ARGUMENT, f"{field}: the grammar cannot be followed after {num_tokens} tokens: {why}", field=field
    )
