"""The programs of penalties and masks: one shapes logits between LM head and sampler, one counts what was sampled, one
writes a slot's dense row.  A step in which nobody asks for any of it runs none of them.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jserve.parallel.placement import Placement
from jserve.runner import shaping_state
from jserve.runner.shaping_state import DenseRow
from jserve.sampling.shaping import ShapingRows, count_tokens, empty_rows, num_words, set_row, shape


class ShapingPrograms:
    """Builds and calls them; `compiled` is where the executables of `jobs` are."""

    def __init__(self, num_slots: int, vocab_size: int, row_buckets: tuple[int, ...], placement: Placement):
        self._num_slots = num_slots
        self._vocab_size = vocab_size
        self._row_buckets = row_buckets
        self._placement = placement
        self._compiled: dict = {}
        self._every_token: dict[int, jax.Array] = {}

    def rows_shape(self) -> ShapingRows:
        """Of the dense rows; they start as zeros."""
        return self._placement.shapes_whole(jax.eval_shape(lambda: empty_rows(self._num_slots, self._vocab_size)))

    def jobs(self) -> dict[tuple, Callable[[], jax.stages.Lowered]]:
        """program -> function that lowers it."""
        shape, lowering = self._placement.shape, self._placement.lowering
        i32 = lambda *size: shape(size, jnp.int32)
        rows = self.rows_shape()
        slot_tokens = i32(self._num_slots + 1)
        jobs: dict = {}
        for count in self._row_buckets:
            logits = shape((count, self._vocab_size), jnp.float32)
            packed, bits = i32(count, shaping_state.NUM_COLUMNS), i32(count, num_words(self._vocab_size))
            jobs["shape", count] = lowering(_shape, (logits, rows, slot_tokens, packed, bits))
            jobs["count", count] = lowering(_count, (rows, slot_tokens, packed), donated=(0,))
        dense_row = [shape((self._vocab_size,), kind) for kind in (bool, jnp.int32, jnp.float32)]
        jobs["shaping", "row"] = lowering(set_row, (rows, i32(), *dense_row), donated=(0,))
        return jobs

    def use(self, compiled: dict) -> None:
        """Takes the executables of `jobs`."""
        self._compiled = compiled
        every = lambda count: jax.device_put(np.full((count, num_words(self._vocab_size)), -1, np.int32))
        self._every_token = {count: self._placement.put_whole(every(count)) for count in self._row_buckets}

    def set_row(self, rows: ShapingRows, slot: int, row: DenseRow) -> ShapingRows:
        """Donates rows."""
        return self._compiled["shaping", "row"](rows, np.int32(slot), row.prompt_seen, row.output_counts, row.bias)

    def shape(
        self, logits: jax.Array, rows: ShapingRows, slot_tokens: jax.Array, packed: np.ndarray,
        allowed_bits: np.ndarray | None = None,
    ) -> jax.Array:
        """f32[R, V] logits from f32[R, V].

        Args:
          packed: i32[R, columns] of ShapingState.
          allowed_bits: i32[R, W] grammar masks; None: every token.
        """
        bits = self._every_token[len(packed)] if allowed_bits is None else allowed_bits
        return self._compiled["shape", len(packed)](logits, rows, slot_tokens, packed, bits)

    def count(self, rows: ShapingRows, slot_tokens: jax.Array, packed: np.ndarray) -> ShapingRows:
        """Donates rows.  Counts what the slots in `packed` have just sampled."""
        return self._compiled["count", len(packed)](rows, slot_tokens, packed)

    def run_each_once(self, logits: jax.Array, rows: ShapingRows, slot_tokens: jax.Array) -> ShapingRows:
        """Donates rows; returns them unchanged."""
        size = self._vocab_size
        neutral = DenseRow(np.zeros(size, bool), np.zeros(size, np.int32), np.zeros(size, np.float32))
        rows = self.set_row(rows, self._num_slots, neutral)
        packed = shaping_state.padding(len(logits), self._num_slots, size)
        self.shape(logits, rows, slot_tokens, packed)
        return self.count(rows, slot_tokens, packed)


def _shape(logits, rows: ShapingRows, slot_tokens, packed, allowed_bits):
    return shape(logits, shaping_state.unpack(packed, rows, slot_tokens[packed[:, 0]], allowed_bits))


def _count(rows: ShapingRows, slot_tokens, packed):
    return count_tokens(rows, packed[:, 0], slot_tokens[packed[:, 0]])
