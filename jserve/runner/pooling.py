"""Embeddings: which hidden states of a step belong to which sum, and the sums that came back.

A step adds up what it computed of each prompt; sums of several chunks meet on the host (engine.embedding).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import numpy as np

from jserve.request import Pooling
from jserve.runner.compile_plan import SCORED_ROWS
from jserve.scheduler.plan import PooledStates, StepPlan


@dataclass(frozen=True)
class Pooled:
    """Sums on their way from the device: that of pieces[i] is row i."""

    pieces: list[tuple[int, int, int]]
    """(row of the plan, first position, number of tokens)"""
    sums: jax.Array  # f32[num_slots, D]

    def read(self) -> list[PooledStates]:
        totals = np.asarray(self.sums)[: len(self.pieces)].copy()  # not a view of all rows
        return [PooledStates(*piece, total) for piece, total in zip(self.pieces, totals)]


def start_pooling(
    plan: StepPlan, no_sums: jax.Array, add: Callable[[jax.Array, np.ndarray], jax.Array]
) -> Pooled | None:
    """Starts the sums of a step; None where no row asks for any.

    Args:
      add: adds what one i32[2, SCORED_ROWS] of flat tokens and places in the sums names.
    """
    pieces, spans = [], []
    ends = np.cumsum(plan.num_scheduled)
    for row, sequence in enumerate(plan.sequences):
        if sequence.sampling.pooling is None:
            continue
        first, count = int(plan.first_positions[row]), int(plan.num_scheduled[row])
        start = max(first, first_pooled(sequence.sampling.pooling, sequence.num_prompt))
        if (length := first + count - start) > 0:
            pieces.append((row, start, length))
            spans.append((int(ends[row]) - length, length))
    if not pieces:
        return None
    sums = no_sums
    for packed in _packed(spans, len(no_sums)):
        sums = add(sums, packed)
    return Pooled(pieces, sums)


def first_pooled(pooling: Pooling, num_prompt: int) -> int:
    """Position of the first token that counts."""
    return 0 if pooling is Pooling.MEAN else num_prompt - 1


def _packed(spans: list[tuple[int, int]], padding: int) -> Iterator[np.ndarray]:
    """Flat tokens and the number of their span, SCORED_ROWS at a time."""
    tokens = np.concatenate([np.arange(start, start + length) for start, length in spans])
    places = np.repeat(np.arange(len(spans)), [length for _, length in spans])
    for at in range(0, len(tokens), SCORED_ROWS):
        count = min(SCORED_ROWS, len(tokens) - at)
        packed = np.zeros((2, SCORED_ROWS), np.int32)
        packed[1] = padding
        packed[0, :count], packed[1, :count] = tokens[at : at + count], places[at : at + count]
        yield packed
