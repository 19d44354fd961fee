"""Penalties, bias, allowed ids and bad words: what FULL does to logits, and the rows by slot that it needs.

Dense rows live on the device by slot: written when a request is admitted or resumed, counted up after each step.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ShapingInputs:
    """What reshapes each row's logits; the neutral row is penalties 1, 0, 0 and a bias of zeros."""

    repetition: Array  # f32[R], over prompt and output, 1 is off
    presence: Array  # f32[R], over the output, 0 is off
    frequency: Array  # f32[R], over the output, 0 is off
    prompt_seen: Array  # bool[R, V]
    output_counts: Array  # i32[R, V]
    bias: Array  # f32[R, V], -inf where an id is not allowed


def shape(logits: Array, shaping: ShapingInputs) -> Array:
    """f32[R, V]: bias, then repetition, then frequency and presence, as vLLM; -inf stays -inf."""
    logits = logits + shaping.bias
    in_output = shaping.output_counts > 0
    repetition = shaping.repetition[:, None]
    penalised = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(in_output | shaping.prompt_seen, penalised, logits)
    logits = logits - shaping.frequency[:, None] * shaping.output_counts.astype(jnp.float32)
    return logits - jnp.where(in_output, shaping.presence[:, None], 0.0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ShapingRows:
    """Dense state of S slots."""

    prompt_seen: Array  # bool[S, V]
    output_counts: Array  # i32[S, V]
    bias: Array  # f32[S, V]


def empty_rows(num_slots: int, vocab_size: int) -> ShapingRows:
    shape_SV = (num_slots, vocab_size)
    return ShapingRows(jnp.zeros(shape_SV, bool), jnp.zeros(shape_SV, jnp.int32), jnp.zeros(shape_SV, jnp.float32))


def set_row(rows: ShapingRows, slot: Array, prompt_seen: Array, output_counts: Array, bias: Array) -> ShapingRows:
    """One slot's row from bool[V], i32[V], f32[V]; jit it with `rows` donated."""
    return ShapingRows(
        rows.prompt_seen.at[slot].set(prompt_seen),
        rows.output_counts.at[slot].set(output_counts),
        rows.bias.at[slot].set(bias),
    )


def count_tokens(rows: ShapingRows, slots: Array, token_ids: Array, is_used: Array) -> ShapingRows:
    """Counts i32[R] sampled ids into the rows of i32[R] slots; jit it with `rows` donated."""
    slots = jnp.where(is_used, slots, rows.output_counts.shape[0])  # beyond the end: dropped
    counts = rows.output_counts.at[slots, token_ids].add(1, mode="drop")
    return ShapingRows(rows.prompt_seen, counts, rows.bias)


def shaping_inputs(rows: ShapingRows, slots: Array, repetition: Array, presence: Array, frequency: Array):
    """ShapingInputs of i32[R] slots, gathered inside the sampler's program."""
    take = lambda array: jnp.take(array, slots, axis=0, mode="clip")
    return ShapingInputs(repetition, presence, frequency, *map(take, (rows.prompt_seen, rows.output_counts, rows.bias)))
