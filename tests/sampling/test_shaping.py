"""Rows of penalties and bias by slot: set, counted up, gathered; padding rows count nothing."""

from __future__ import annotations

import jax
import numpy as np

from jserve.sampling.shaping import ShapingInputs, count_tokens, empty_rows, gather, num_words, set_row, shape

V = 30


def inputs_of(rows, slots, repetition, presence, frequency) -> ShapingInputs:
    """No bad words, no grammar."""
    count, vocab_size = len(slots), rows.bias.shape[1]
    return ShapingInputs(
        repetition, presence, frequency, *gather(rows, slots),
        word_ends=np.full((count, 2), vocab_size, np.int32),
        allowed_bits=np.full((count, num_words(vocab_size)), 2**32 - 1, np.uint32),
    )


def test_counts_follow_the_slots_and_survive_a_rewrite_from_the_token_list():
    rows = empty_rows(4, V)
    prompt_seen = np.zeros(V, bool)
    prompt_seen[[3, 4]] = True
    rows = set_row(rows, 2, prompt_seen, np.zeros(V, np.int32), np.zeros(V, np.float32))
    count = jax.jit(count_tokens)
    slots = np.array([2, 0, 4], np.int32)  # the last is the neutral row's
    for token_id in (7, 7, 3):
        rows = count(rows, slots, np.array([token_id, 9, 5], np.int32))
    counts = np.asarray(rows.output_counts)
    assert counts[2, 7] == 2 and counts[2, 3] == 1 and counts[0, 9] == 3
    assert counts.sum() == 6 and counts[4].sum() == 0
    # After a preemption the row is written anew from the sequence's own tokens: the same state.
    again = set_row(rows, 2, prompt_seen, np.bincount([7, 7, 3], minlength=V).astype(np.int32), np.zeros(V, np.float32))
    jax.tree.map(np.testing.assert_array_equal, again, rows)


def test_the_neutral_row_leaves_logits_alone():
    logits = np.random.default_rng(0).normal(size=(2, V)).astype(np.float32)
    one, zero = np.ones(2, np.float32), np.zeros(2, np.float32)
    inputs = inputs_of(empty_rows(3, V), np.array([2, 0]), one, zero, zero)
    np.testing.assert_array_equal(shape(logits, inputs), logits)


def test_penalties_by_hand():
    """Repetition over prompt and output, presence and frequency over the output only; bias comes first."""
    rows = empty_rows(1, 4)
    bias = np.array([0, 0, 1, -np.inf], np.float32)
    rows = set_row(rows, 0, np.array([True, False, False, True]), np.array([0, 2, 1, 0]), bias)
    inputs = inputs_of(rows, np.array([0]), np.float32([2]), np.float32([0.5]), np.float32([0.25]))
    shaped = np.asarray(shape(np.array([[4, -4, 1, 9]], np.float32), inputs))[0]
    assert shaped.tolist() == [4 / 2, -4 * 2 - 2 * 0.25 - 0.5, (1 + 1) / 2 - 0.25 - 0.5, -np.inf]
