"""Penalties, bias, allowed ids, bad words and grammar masks: what they do to logits, and the rows by slot that they need.

Dense rows live on the device by slot: written when a request enters its slot, counted up by each step that samples it.
One more row, the last, stays neutral: rows of requests that ask for none of this read it.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ShapingInputs:
    """What reshapes each row's logits; the neutral row is penalties 1, 0, 0, a bias of zeros, every bit set."""

    repetition: Array  # f32[R], over prompt and output, 1 is off
    presence: Array  # f32[R], over the output, 0 is off
    frequency: Array  # f32[R], over the output, 0 is off
    prompt_seen: Array  # bool[R, V]
    output_counts: Array  # i32[R, V]
    bias: Array  # f32[R, V], -inf where an id is not allowed
    word_ends: Array  # i32[R, B], ids that would complete a bad word; V and beyond: none
    allowed_bits: Array  # u32[R, ceil(V / 32)], bit v % 32 of word v // 32 is set where the grammar allows id v


def shape(logits: Array, shaping: ShapingInputs) -> Array:
    """f32[R, V]: masks, bias, then repetition, then frequency and presence, as vLLM; -inf stays -inf."""
    logits = logits + shaping.bias
    logits = _ban_word_ends(logits, shaping.word_ends)
    logits = jnp.where(unpack_bits(shaping.allowed_bits, logits.shape[1]), logits, -jnp.inf)
    in_output = shaping.output_counts > 0
    repetition = shaping.repetition[:, None]
    penalised = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(in_output | shaping.prompt_seen, penalised, logits)
    logits = logits - shaping.frequency[:, None] * shaping.output_counts.astype(jnp.float32)
    return logits - jnp.where(in_output, shaping.presence[:, None], 0.0)


def num_words(vocab_size: int) -> int:
    """u32 words of a row of allowed_bits."""
    return -(-vocab_size // 32)


def unpack_bits(bits: Array, vocab_size: int) -> Array:
    """bool[R, V] of u32[R, ceil(V / 32)]."""
    spread = (bits[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return spread.reshape(bits.shape[0], -1)[:, :vocab_size] != 0


def _ban_word_ends(logits: Array, word_ends: Array) -> Array:
    rows = jnp.arange(logits.shape[0])[:, None]
    return lax.cond(
        jnp.any(word_ends < logits.shape[1]),
        lambda: logits.at[rows, word_ends].set(-jnp.inf, mode="drop"),
        lambda: logits,
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ShapingRows:
    """Dense state of S slots and of the neutral row behind them."""

    prompt_seen: Array  # bool[S + 1, V]
    output_counts: Array  # i32[S + 1, V]
    bias: Array  # f32[S + 1, V]

    @property
    def neutral(self) -> int:
        return self.bias.shape[0] - 1


BYTES_PER_ID = 9
"""Bytes of ShapingRows for each id of each row."""


def empty_rows(num_slots: int, vocab_size: int) -> ShapingRows:
    shape_SV = (num_slots + 1, vocab_size)
    return ShapingRows(jnp.zeros(shape_SV, bool), jnp.zeros(shape_SV, jnp.int32), jnp.zeros(shape_SV, jnp.float32))


def set_row(rows: ShapingRows, slot: Array, prompt_seen: Array, output_counts: Array, bias: Array) -> ShapingRows:
    """One slot's row from bool[V], i32[V], f32[V]; jit it with `rows` donated."""
    return ShapingRows(
        rows.prompt_seen.at[slot].set(prompt_seen),
        rows.output_counts.at[slot].set(output_counts),
        rows.bias.at[slot].set(bias),
    )


def count_tokens(rows: ShapingRows, slots: Array, token_ids: Array) -> ShapingRows:
    """Counts i32[R] sampled ids into the rows of i32[R] slots, but the neutral one; donate `rows` to its program."""
    slots = jnp.where(slots < rows.neutral, slots, rows.neutral + 1)  # beyond the end: dropped
    counts = rows.output_counts.at[slots, token_ids].add(1, mode="drop")
    return ShapingRows(rows.prompt_seen, counts, rows.bias)


def gather(rows: ShapingRows, slots: Array) -> tuple[Array, Array, Array]:
    """(prompt_seen, output_counts, bias) of i32[R] slots, inside the sampler's program."""
    take = lambda array: jnp.take(array, slots, axis=0, mode="clip")
    return take(rows.prompt_seen), take(rows.output_counts), take(rows.bias)
