"""min_p, top_k and top_p as one number a row: the logit from which on tokens are kept.

All three keep the tokens above some logit, so their combination is the largest of three thresholds.  Tokens that tie
with the threshold are kept.  Most rows are settled by their NUM_CANDIDATES largest logits; the others, in blocks of
rows, by bisection over the order-preserving bits of float32.  No sort over the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from jserve.sampling.scores import MASS_CHUNK, chunked, largest

NUM_CANDIDATES = 64
"""Logits looked at before bisection: enough for any top_k up to it and most nuclei."""
BISECTION_ROWS = 2
"""Rows bisected at a time: their logits and weights (0.8 MB for V = 49152) stay in a core's cache."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Filters:
    """What each row keeps, in the order in which it applies (vLLM's): min_p, then top_k of that, then top_p of that."""

    temperature: Array  # f32[R], > 0
    min_p: Array  # f32[R], 0 is off
    top_k: Array  # i32[R], 0 is off
    top_p: Array  # f32[R], 1 is off


def min_p_threshold(maximum: Array, filters: Filters) -> Array:
    """f32[R]: p >= min_p * the largest p, in logits; -inf where off.  min_p = 1 keeps exactly the maximum."""
    return maximum + filters.temperature * jnp.log(filters.min_p)


def keep_threshold(logits: Array, maximum: Array, filters: Filters, total: Array) -> Array:
    """f32[R] threshold of logits f32[R, V]; `total` is the weight, exp((x - maximum) / temperature), min_p leaves."""
    floor = min_p_threshold(maximum, filters)
    threshold, settled = _from_candidates(logits, maximum, filters, floor, total)
    return lax.cond(
        jnp.all(settled),
        lambda: threshold,
        lambda: _bisect_rows(logits, maximum, filters, floor, threshold, settled),
    )


def _from_candidates(logits, maximum, filters, floor, total) -> tuple[Array, Array]:
    """(threshold, whether it is exact), from the largest logits of each row alone."""
    num_candidates = min(NUM_CANDIDATES, logits.shape[1])
    values, _ = largest(logits, num_candidates)
    last = values[:, -1]
    uses_top_k, uses_top_p = filters.top_k > 0, filters.top_p < 1
    place = jnp.clip(filters.top_k - 1, 0, num_candidates - 1)
    kth = jnp.take_along_axis(values, place[:, None], axis=1)[:, 0]
    floor = jnp.maximum(floor, jnp.where(uses_top_k, kth, -jnp.inf))

    weights = jnp.exp((values - maximum[:, None]) / filters.temperature[:, None])
    weights = jnp.where(values >= floor[:, None], weights, 0.0)
    running = jnp.cumsum(weights, axis=1)
    all_seen = (last < floor) | (num_candidates == logits.shape[1])
    total = jnp.where(all_seen, running[:, -1], total)
    wanted = _nucleus_mass(filters.top_p, total)
    # A token belongs to the nucleus while those before it have not reached the mass.
    before = jnp.pad(running[:, :-1], ((0, 0), (1, 0)))
    nucleus = jnp.sum((before < wanted[:, None]) & (values >= floor[:, None]), axis=1)
    in_nucleus = jnp.take_along_axis(values, jnp.maximum(nucleus - 1, 0)[:, None], axis=1)[:, 0]

    settled_k = ~uses_top_k | (filters.top_k <= num_candidates)
    # Without top_k the total is known; with it, only where no tie with the k-th may lie beyond the candidates.
    settled_p = ~uses_top_p | all_seen | (~uses_top_k & (running[:, -1] >= wanted))
    return jnp.where(uses_top_p, in_nucleus, floor), settled_k & settled_p


def _bisect_rows(logits, maximum, filters, floor, threshold, settled) -> Array:
    """Thresholds with the rows that are not settled bisected, BISECTION_ROWS at a time."""
    num_rows = logits.shape[0]
    block = min(BISECTION_ROWS, num_rows)
    # Unsettled rows first, then row numbers that exist nowhere, so that the last block may run over.
    order = jnp.sort(jnp.where(settled, num_rows, jnp.arange(num_rows)))
    order = jnp.pad(order, (0, -num_rows % block), constant_values=num_rows)

    def one_block(index, threshold):
        rows = lax.dynamic_slice_in_dim(order, index * block, block)
        used = rows < num_rows
        take = lambda array: jnp.take(array, rows, axis=0, mode="clip")
        found = _bisect_block(take(logits), take(maximum), jax.tree.map(take, filters), take(floor), used)
        return threshold.at[rows].set(found, mode="drop")

    num_blocks = (jnp.sum(~settled) + block - 1) // block
    return lax.fori_loop(0, num_blocks, one_block, threshold)


def _bisect_block(logits, maximum, filters, floor, used) -> Array:
    uses_top_k, uses_top_p = used & (filters.top_k > 0), used & (filters.top_p < 1)
    lowest = jnp.min(jnp.where(jnp.isneginf(logits), maximum[:, None], logits), axis=1)
    kth = _bisect(logits, jnp.ones_like, filters.top_k.astype(jnp.float32), lowest, maximum, uses_top_k)
    floor = jnp.maximum(floor, jnp.where(uses_top_k, kth, -jnp.inf))

    def weigh(values):
        return jnp.exp((values - maximum[:, None]) / filters.temperature[:, None])

    total = _mass(jnp.where(logits >= floor[:, None], weigh(logits), 0.0))
    in_nucleus = _bisect(logits, weigh, _nucleus_mass(filters.top_p, total), lowest, maximum, uses_top_p)
    return jnp.where(uses_top_p, jnp.maximum(in_nucleus, floor), floor)


def _bisect(logits, weigh, wanted, lowest, highest, active) -> Array:
    """f32[R]: the largest logit t with sum(weigh(logits) where logits >= t) >= wanted; where none reaches it, lowest.

    `weigh` grows with the logit.  Invariant: the threshold is in [low, high), as ordered bits.  A row is done when
    one number is left there, or so little mass that it is one token: less than 1.5 of the lightest there may be.
    """
    weights = weigh(logits)

    def unfinished(state):
        _, low, high, mass_low, mass_high = state
        lightest = weigh(_from_ordered(low)[:, None])[:, 0]
        return active & (low < high - 1) & (mass_low - mass_high >= 1.5 * lightest)

    def narrow(state):
        step, low, high, mass_low, mass_high = state
        # In turn the middle of the values, quick where logits are spread evenly, and of the bits, which bounds the
        # number of steps by 64.
        middle_value = _to_ordered(0.5 * _from_ordered(low) + 0.5 * _from_ordered(high))
        middle_bits = (low & high) + ((low ^ high) >> 1)
        middle = jnp.clip(jnp.where(step % 2 == 0, middle_value, middle_bits), low + 1, high - 1)
        mass = _mass(jnp.where(logits >= _from_ordered(middle)[:, None], weights, 0.0))
        moves = unfinished(state)
        raises, lowers = moves & (mass >= wanted), moves & (mass < wanted)
        return (
            step + 1,
            jnp.where(raises, middle, low),
            jnp.where(lowers, middle, high),
            jnp.where(raises, mass, mass_low),
            jnp.where(lowers, mass, mass_high),
        )

    unknown = jnp.full_like(wanted, jnp.inf)
    state = (jnp.int32(0), _to_ordered(lowest), _to_ordered(highest) + 1, unknown, jnp.zeros_like(wanted))
    _, low, *_ = lax.while_loop(lambda state: jnp.any(unfinished(state)), narrow, state)
    return jnp.min(jnp.where(logits >= _from_ordered(low)[:, None], logits, jnp.inf), axis=1)


def _nucleus_mass(top_p: Array, total: Array) -> Array:
    # Never 0, so that the most probable token always stays.
    return jnp.maximum(top_p * total, jnp.finfo(jnp.float32).tiny)


def _mass(weights: Array) -> Array:
    """f32[R] sums, chunk by chunk: the same bits for a row in any batch, and exact for counts below 2**24."""
    return jnp.sum(jnp.sum(chunked(weights, MASS_CHUNK, fill=0.0), axis=2), axis=1)


def _to_ordered(values: Array) -> Array:
    """i32 that orders as the float32 values do (NaN excluded)."""
    bits = lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _from_ordered(ordered: Array) -> Array:
    return lax.bitcast_convert_type(jnp.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered), jnp.float32)
