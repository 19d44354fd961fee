"""StepInputs: a StepPlan as arrays, padded to its bucket, packed into one int32 buffer so that one transfer carries it.

`build` runs on the host (numpy), `unpack` inside jit.  Padding rows have kv_len 0 and the dead block in their table;
padding tokens belong to no row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jserve.runner.compile_plan import StepShape
from jserve.scheduler.plan import StepPlan
from pallas_kernels.paged_attention import RaggedBatch


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInputs:
    """What the forward program reads; the same names on host and device."""

    token_ids: jax.Array  # i32[T]
    positions: jax.Array  # i32[T] absolute; 0 for padding
    feed_slots: jax.Array  # i32[T] slot whose last sampled id stands here, or num_slots: token_ids holds the id
    sample_tokens: jax.Array  # i32[num_slots] flat tokens whose hidden state the sampler reads, in row order
    kv_lens: jax.Array  # i32[S]
    cu_q_lens: jax.Array  # i32[S + 1]
    num_decodes: jax.Array  # i32[]
    tables: tuple[jax.Array, ...]  # per layer group i32[S, max_blocks]

    def batches(self) -> tuple[RaggedBatch, ...]:
        """The step's geometry for each layer group."""
        return tuple(
            RaggedBatch(table, self.kv_lens, self.cu_q_lens, self.num_decodes) for table in self.tables
        )


@dataclass(frozen=True)
class InputLayout:
    """Where each field of StepInputs lies in the packed buffer of one step shape."""

    shape: StepShape
    num_slots: int
    max_blocks: int
    num_groups: int

    def fields(self) -> dict[str, tuple[int, ...]]:
        tokens, rows = self.shape.num_tokens, self.shape.num_rows
        sizes = {
            "token_ids": (tokens,), "positions": (tokens,), "feed_slots": (tokens,),
            "sample_tokens": (self.num_slots,), "kv_lens": (rows,), "cu_q_lens": (rows + 1,), "num_decodes": (),
        }
        return sizes | {f"table{group}": (rows, self.max_blocks) for group in range(self.num_groups)}

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for shape in self.fields().values())

    def views(self, packed) -> dict[str, np.ndarray]:
        """Fields as slices of `packed` (numpy: views that can be written; jax: values)."""
        views, at = {}, 0
        for name, shape in self.fields().items():
            count = math.prod(shape)
            views[name] = packed[at : at + count].reshape(shape)
            at += count
        return views

    def unpack(self, packed: jax.Array) -> StepInputs:
        views = self.views(packed)
        tables = tuple(views.pop(f"table{group}") for group in range(self.num_groups))
        return StepInputs(tables=tables, **views)


def build(plan: StepPlan, layout: InputLayout, tables: tuple[np.ndarray, ...]) -> np.ndarray:
    """The packed buffer of a plan, i32[layout.size].

    Args:
      tables: block tables by slot of each layer group, i32[num_slots, max_blocks].
    """
    packed = np.zeros(layout.size, np.int32)  # fresh each step: the device may read it without a copy
    views = layout.views(packed)
    rows, singles = plan.num_rows, plan.num_decodes
    ends = np.cumsum(plan.num_scheduled, dtype=np.int32)
    views["kv_lens"][:rows] = plan.first_positions + plan.num_scheduled
    views["cu_q_lens"][1 : rows + 1] = ends
    views["cu_q_lens"][rows + 1 :] = plan.num_tokens
    views["num_decodes"][...] = singles
    for group, table in enumerate(tables):
        np.take(table, plan.slots, axis=0, out=views[f"table{group}"][:rows], mode="clip")
    feed_slots = views["feed_slots"]
    feed_slots[:] = layout.num_slots
    feed_slots[:singles] = np.where(plan.feeds[:singles], plan.slots[:singles], layout.num_slots)
    views["positions"][:singles] = plan.first_positions[:singles]
    token_ids = views["token_ids"]
    for row in np.flatnonzero(~plan.feeds[:singles]):
        token_ids[row] = plan.sequences[row].tokens[plan.first_positions[row]]
    for row in range(singles, rows):
        first, count, end = plan.first_positions[row], plan.num_scheduled[row], ends[row]
        token_ids[end - count : end] = plan.sequences[row].tokens[first : first + count]
        views["positions"][end - count : end] = np.arange(first, first + count, dtype=np.int32)
    sampled = plan.sampling_rows
    views["sample_tokens"][: len(sampled)] = ends[sampled] - 1
    return packed


def fed_token_ids(inputs: StepInputs, slot_tokens: jax.Array) -> jax.Array:
    """Token ids with the ids that only the device knows filled in.

    Args:
      slot_tokens: i32[num_slots + 1], the id that each slot sampled last; the last entry is the dead slot.
    """
    dead_slot = slot_tokens.shape[0] - 1
    return jnp.where(inputs.feed_slots < dead_slot, slot_tokens[inputs.feed_slots], inputs.token_ids)
