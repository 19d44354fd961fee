"""What penalties and masks need of the running sequences: dense rows on the device by slot, each step's small inputs.

A dense row is written from the sequence's own tokens when it enters its slot, so that prefix hits, chunks and preemption
cannot be seen in it; from then on the device counts what it samples.  Rows that ask for nothing cost nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jserve.sampling.limits import MAX_BAD_WORD_SEQUENCES
from jserve.sampling.shaping import ShapingInputs, ShapingRows, gather
from jserve.scheduler.plan import StepPlan
from jserve.scheduler.sequence import Sequence

_NUM_WORDS = MAX_BAD_WORD_SEQUENCES
NUM_COLUMNS = 4 + 2 * _NUM_WORDS
_ANY = -1
"""Stands for the last token of a bad word's beginning where the host has seen it already."""


@dataclass(frozen=True)
class DenseRow:
    """One slot's row of ShapingRows."""

    prompt_seen: np.ndarray  # bool[V]
    output_counts: np.ndarray  # i32[V]
    bias: np.ndarray  # f32[V]


class ShapingState:
    """The host's side, by slot."""

    def __init__(self, num_slots: int, vocab_size: int):
        self._num_slots = num_slots
        self._vocab_size = vocab_size
        self._is_shaped = np.zeros(num_slots, bool)
        self._dense_rows = np.full(num_slots, num_slots, np.int32)  # num_slots: the neutral row
        self._penalties = np.ones((num_slots, 3), np.float32)
        self._bad_words: list[tuple[tuple[int, ...], ...]] = [()] * num_slots

    def enter(self, sequence: Sequence) -> DenseRow | None:
        """Takes over a sequence that entered its slot; its dense row, or None where it needs none."""
        slot, sampling = sequence.slot, sequence.sampling
        penalties = sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
        self._is_shaped[slot] = sampling.is_shaped
        self._penalties[slot] = penalties
        self._bad_words[slot] = tuple(word for word in sampling.bad_words if len(word) > 1)
        needs_row = penalties != (1, 0, 0) or sampling.logit_bias or sampling.allowed_token_ids or sampling.bad_words
        self._dense_rows[slot] = slot if needs_row else self._num_slots
        return self._dense_row(sequence) if needs_row else None

    def is_shaped(self, slots: np.ndarray) -> bool:
        """Whether any of the slots asks for something."""
        return bool(self._is_shaped[slots].any())

    def build(self, plan: StepPlan, num_rows: int) -> np.ndarray:
        """i32[num_rows, NUM_COLUMNS] for the plan's sampling rows; `unpack` reads it."""
        packed = padding(num_rows, self._num_slots, self._vocab_size)
        for at, row in enumerate(plan.sampling_rows.tolist()):
            slot = int(plan.slots[row])
            if not self._is_shaped[slot]:
                continue
            packed[at, 0] = self._dense_rows[slot]
            packed[at, 1:4] = self._penalties[slot].view(np.int32)
            if self._bad_words[slot]:
                ends = _word_ends(self._bad_words[slot], plan.sequences[row], int(plan.output_index[row]))
                for column, (end, before) in enumerate(ends, 4):
                    packed[at, column], packed[at, column + _NUM_WORDS] = end, before
        return packed

    def _dense_row(self, sequence: Sequence) -> DenseRow:
        size, sampling = self._vocab_size, sequence.sampling
        prompt_seen = np.zeros(size, bool)
        prompt_seen[sequence.tokens[: sequence.num_prompt]] = True
        output_counts = np.bincount(sequence.tokens[sequence.num_prompt : sequence.num_known], minlength=size)
        bias = np.zeros(size, np.float32)
        if sampling.allowed_token_ids:
            bias[:] = -np.inf
            bias[list(sampling.allowed_token_ids)] = 0
        bias[[word[0] for word in sampling.bad_words if len(word) == 1]] = -np.inf
        for token_id, value in sampling.logit_bias:
            bias[token_id] += value
        return DenseRow(prompt_seen, output_counts.astype(np.int32), bias)


def padding(num_rows: int, num_slots: int, vocab_size: int) -> np.ndarray:
    """i32[num_rows, NUM_COLUMNS] of rows that ask for nothing."""
    packed = np.full((num_rows, NUM_COLUMNS), _ANY, np.int32)
    packed[:, 0] = num_slots  # the neutral row
    packed[:, 1:4] = np.array([1, 0, 0], np.float32).view(np.int32)
    packed[:, 4 : 4 + _NUM_WORDS] = vocab_size  # no id
    return packed


def _word_ends(words: tuple[tuple[int, ...], ...], sequence: Sequence, num_before: int) -> list[tuple[int, int]]:
    """(id that completes a bad word, id that must stand before it or _ANY), for the token after `num_before` of the output.

    The last of these may be known to the device alone: then the host compares all but it, and the device the rest.
    """
    known = sequence.tokens[sequence.num_prompt : sequence.num_known].tolist()
    num_unknown = num_before - len(known)
    assert num_unknown in (0, 1), f"{num_unknown} tokens in flight: only one step may be"
    ends = []
    for word in words:
        start = word[: len(word) - 1 - num_unknown]
        if len(word) - 1 <= num_before and known[len(known) - len(start) :] == list(start):
            ends.append((word[-1], word[-2] if num_unknown else _ANY))
    return ends


def unpack(packed: jax.Array, rows: ShapingRows, last_tokens: jax.Array, allowed_bits: jax.Array) -> ShapingInputs:
    """Inside jit.

    Args:
      packed: i32[R, NUM_COLUMNS] of `ShapingState.build`.
      last_tokens: i32[R], the id that each row's slot sampled last.
      allowed_bits: i32[R, W] grammar masks.
    """
    penalties = jax.lax.bitcast_convert_type(packed[:, 1:4], jnp.float32)
    ends, befores = packed[:, 4 : 4 + _NUM_WORDS], packed[:, 4 + _NUM_WORDS :]
    applies = (befores == _ANY) | (befores == last_tokens[:, None])
    prompt_seen, output_counts, bias = gather(rows, packed[:, 0])
    return ShapingInputs(
        repetition=penalties[:, 0],
        presence=penalties[:, 1],
        frequency=penalties[:, 2],
        prompt_seen=prompt_seen,
        output_counts=output_counts,
        bias=bias,
        word_ends=jnp.where(applies, ends, bias.shape[1]),
        allowed_bits=jax.lax.bitcast_convert_type(allowed_bits, jnp.uint32),
    )
