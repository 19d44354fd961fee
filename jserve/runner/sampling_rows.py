"""Sampling parameters of the running sequences, by slot, and the sampler's inputs of one step.

Written when a sequence enters its slot; each step takes the rows it samples.  Everything is packed into one int32 buffer
(floats by their bits), so that one transfer carries it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jserve.runner.shaping_state import ShapingState
from jserve.sampling.limits import MAX_BANNED_TOKEN_IDS
from jserve.sampling.sampler import SamplerInputs, SamplerKind, SamplerVariant
from jserve.scheduler.plan import StepPlan
from jserve.scheduler.sequence import Sequence

_SCALARS = ("slot", "position", "sample_index", "seed_high", "seed_low", "top_k", "num_banned")
_FLOATS = ("temperature", "top_p", "min_p")
NUM_COLUMNS = len(_SCALARS) + len(_FLOATS) + MAX_BANNED_TOKEN_IDS


class SamplingRows:
    """Numpy structure-of-arrays by slot; one row of int32 columns a slot."""

    def __init__(self, num_slots: int, vocab_size: int):
        self._num_slots = num_slots
        self.shaping = ShapingState(num_slots, vocab_size)
        self._rows = np.zeros((num_slots, NUM_COLUMNS), np.int32)
        self._min_tokens = np.zeros(num_slots, np.int32)
        self._num_banned = np.zeros(num_slots, np.int32)
        self._is_random = np.zeros(num_slots, bool)
        self._wants_logprobs = np.zeros(num_slots, bool)
        self._reads_prompt = np.zeros(num_slots, bool)

    def enter(self, sequence: Sequence) -> None:
        """Takes over the parameters of a sequence that entered its slot."""
        slot, sampling = sequence.slot, sequence.sampling
        row = self._rows[slot]
        row[:] = 0
        row[0] = slot
        row[2] = sequence.index
        row[3:5] = np.array([sampling.seed >> 32, sampling.seed & 0xFFFFFFFF], np.int64).astype(np.uint32).view(np.int32)
        row[5] = sampling.top_k
        row[7:10] = np.array([sampling.temperature, sampling.top_p, sampling.min_p], np.float32).view(np.int32)
        banned = sampling.banned_below_min_tokens
        row[10 : 10 + len(banned)] = banned
        self._num_banned[slot] = len(banned)
        self._min_tokens[slot] = sampling.min_tokens
        self._is_random[slot] = sampling.temperature > 0
        self._reads_prompt[slot] = sampling.prompt_logprobs is not None or sampling.pooling is not None
        self._wants_logprobs[slot] = sampling.logprobs is not None

    def reads_prompt(self, slots: np.ndarray) -> bool:
        """Whether any of these slots asked for scores or a pooled state of its prompt's tokens."""
        return bool(self._reads_prompt[slots].any())

    def variant(self, slots: np.ndarray) -> SamplerVariant:
        """The cheapest variant that serves all of these slots."""
        kind = SamplerKind.SAMPLE if self._is_random[slots].any() else SamplerKind.GREEDY
        return SamplerVariant(kind, logprobs=bool(self._wants_logprobs[slots].any()))

    def build(self, plan: StepPlan, num_rows: int) -> np.ndarray:
        """i32[num_rows, columns] for the plan's sampling rows; padding rows write to the dead slot."""
        rows = plan.sampling_rows
        slots, position = plan.slots[rows], plan.output_index[rows]
        packed = padding(num_rows, self._num_slots)
        live = packed[: len(rows)]
        np.take(self._rows, slots, axis=0, out=live, mode="clip")
        live[:, 1] = position
        live[:, 6] = np.where(position < self._min_tokens[slots], self._num_banned[slots], 0)
        return packed


def padding(num_rows: int, num_slots: int) -> np.ndarray:
    """i32[num_rows, columns] of padding rows only."""
    packed = np.zeros((num_rows, NUM_COLUMNS), np.int32)
    packed[:, 0] = num_slots
    return packed


def unpack(packed: jax.Array, num_slots: int) -> tuple[jax.Array, SamplerInputs]:
    """Inside jit: i32[R, columns] -> (slots i32[R], SamplerInputs)."""
    floats = jax.lax.bitcast_convert_type(packed[:, 7:10], jnp.float32)
    return packed[:, 0], SamplerInputs(
        temperature=floats[:, 0],
        top_p=floats[:, 1],
        min_p=floats[:, 2],
        top_k=packed[:, 5],
        seed=jax.lax.bitcast_convert_type(packed[:, 3:5], jnp.uint32),
        sample_index=packed[:, 2],
        position=packed[:, 1],
        banned_ids=packed[:, 10:],
        num_banned=packed[:, 6],
        is_used=packed[:, 0] < num_slots,
    )
