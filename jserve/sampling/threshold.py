"""min_p, top_k and top_p of one row as one number: the logit from which on tokens are kept.

All three keep the tokens above some logit, so their combination is the largest of three thresholds.  Tokens that tie
with the threshold are kept.  It is found by bisection over the order-preserving bits of float32, a pass over the row a
step; on CPU most rows are settled before that by their NUM_CANDIDATES largest logits.  No sort over the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from jserve.sampling.draw import kept_weights
from jserve.sampling.scores import largest

NUM_CANDIDATES = 64
"""Logits looked at before bisection: enough for any top_k up to it and most nuclei."""
CANDIDATE_CHUNK = 32
"""Ids a chunk of that search; 32 was the fastest of 16, 32, 64 and 128 on CPU."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Filters:
    """What a row keeps, in the order in which it applies (vLLM's): min_p, then top_k of that, then top_p of that."""

    temperature: Array  # f32[], > 0
    min_p: Array  # f32[], 0 is off
    top_k: Array  # i32[], 0 is off
    top_p: Array  # f32[], 1 is off


def keep_threshold(logits_V: Array, maximum: Array, filters: Filters) -> Array:
    """f32[] threshold of logits f32[V] whose largest is `maximum`; -inf where everything is off."""
    # p >= min_p * the largest p, in logits; min_p = 1 keeps exactly the maximum.
    floor = maximum + filters.temperature * jnp.log(filters.min_p)
    return lax.cond(
        (filters.top_k > 0) | (filters.top_p < 1),
        lambda: _search(logits_V, maximum, filters, floor),
        lambda: floor,
    )


def _search(logits_V: Array, maximum: Array, filters: Filters, floor: Array) -> Array:
    # On TPU the sort inside top_k takes a minute to compile and no row can be spared the bisection anyway.
    return lax.platform_dependent(logits_V, maximum, filters, floor, cpu=_candidates_first, default=_bisected)


def _candidates_first(logits_V: Array, maximum: Array, filters: Filters, floor: Array) -> Array:
    threshold, is_settled = _from_candidates(logits_V, maximum, filters, floor)
    return lax.cond(is_settled, lambda: threshold, lambda: _bisected(logits_V, maximum, filters, floor, True))


def _from_candidates(logits_V, maximum, filters, floor) -> tuple[Array, Array]:
    """(threshold, whether it is exact), from the largest logits alone, where best comes first."""
    num_candidates = min(NUM_CANDIDATES, logits_V.shape[0])
    values = largest(logits_V[None], num_candidates, CANDIDATE_CHUNK)[0][0]
    uses_top_k, uses_top_p = filters.top_k > 0, filters.top_p < 1
    kth = values[jnp.clip(filters.top_k - 1, 0, num_candidates - 1)]
    total = jnp.sum(kept_weights(logits_V, maximum, filters.temperature, floor))
    floor = jnp.maximum(floor, jnp.where(uses_top_k, kth, -jnp.inf))

    weights = kept_weights(values, maximum, filters.temperature, floor)
    running = _running_sum(weights)
    all_seen = (values[-1] < floor) | (num_candidates == logits_V.shape[0])
    wanted = _nucleus_mass(filters.top_p, jnp.where(all_seen, running[-1], total))
    # A token belongs to the nucleus while those before it have not reached the mass.
    before = jnp.pad(running[:-1], (1, 0))
    size = jnp.sum((before < wanted) & (values >= floor))
    in_nucleus = values[jnp.maximum(size - 1, 0)]

    # Without top_k the total is known; with it, only where no tie with the k-th may lie beyond the candidates.
    settled_k = ~uses_top_k | (filters.top_k <= num_candidates)
    settled_p = ~uses_top_p | all_seen | (~uses_top_k & (running[-1] >= wanted))
    return jnp.where(uses_top_p, in_nucleus, floor), settled_k & settled_p


def _running_sum(weights: Array) -> Array:
    """f32[N] sums of the first 1, 2, ... N weights.  One fused reduction, where cumsum becomes six programs on CPU."""
    places = jnp.arange(weights.shape[0])
    return jnp.sum(jnp.where(places[None, :] <= places[:, None], weights[None, :], 0.0), axis=1)


def _bisected(logits_V, maximum, filters, floor, keeps_weights: bool = False) -> Array:
    """The threshold by two searches in one loop: top_k over token counts, then top_p over weights.

    keeps_weights: exponentials are made once, which is what a CPU is short of.  Elsewhere they are made again in every
    pass, which then reads the logits alone: half the bytes, and no second array of the logits' size.
    """
    lowest = jnp.min(jnp.where(jnp.isneginf(logits_V), maximum, logits_V))

    def narrow(stage, floor):
        by_count = stage == 0

        def weigh(logits):
            return jnp.where(by_count, 1.0, jnp.exp((logits - maximum) / filters.temperature))

        weights_V = weigh(logits_V) if keeps_weights else None

        def mass_from(threshold):
            if keeps_weights:
                return jnp.sum(jnp.where(logits_V >= threshold, weights_V, 0.0))
            # Depends on the threshold from the first operation on: of what does not, XLA would make an array before the loop.
            kept_V = jnp.where(logits_V >= threshold, logits_V, -jnp.inf)
            return jnp.sum(jnp.where(jnp.isneginf(kept_V), 0.0, weigh(kept_V)))

        total = mass_from(floor)
        wanted = jnp.where(by_count, filters.top_k.astype(jnp.float32), _nucleus_mass(filters.top_p, total))
        is_used = jnp.where(by_count, filters.top_k > 0, filters.top_p < 1)
        # Where all rows run at once, one that does not search starts where it ends and holds up nobody.
        found = _bisect(logits_V, mass_from, weigh, wanted, jnp.where(is_used, lowest, maximum), maximum)
        return jnp.where(is_used, jnp.maximum(found, floor), floor)

    return lax.fori_loop(0, 2, narrow, floor)


def _bisect(logits_V, mass_from, weigh, wanted, lowest, highest) -> Array:
    """f32[]: the largest logit t with mass_from(t) >= wanted; where none reaches it, lowest.

    mass_from(t) = sum(weigh(logits) where logits >= t); weights grow with the logit.  Invariant: the threshold is in [low, high), as ordered bits.
    Done when one number is left there, or so little mass that it is one token: under 1.5 of the lightest there may be.
    """

    def is_unfinished(state):
        _, low, high, mass_low, mass_high = state
        return (low < high - 1) & (mass_low - mass_high >= 1.5 * weigh(_from_ordered(low)))

    def halve(state):
        step, low, high, mass_low, mass_high = state
        # In turn the middle of the values, quick where logits are spread evenly, and of the bits, which bounds the
        # number of steps by 64.
        middle_value = _to_ordered(0.5 * _from_ordered(low) + 0.5 * _from_ordered(high))
        middle_bits = (low & high) + ((low ^ high) >> 1)
        middle = jnp.clip(jnp.where(step % 2 == 0, middle_value, middle_bits), low + 1, high - 1)
        mass = mass_from(_from_ordered(middle))
        is_enough = mass >= wanted
        return (
            step + 1,
            jnp.where(is_enough, middle, low),
            jnp.where(is_enough, high, middle),
            jnp.where(is_enough, mass, mass_low),
            jnp.where(is_enough, mass_high, mass),
        )

    state = (jnp.int32(0), _to_ordered(lowest), _to_ordered(highest) + 1, jnp.float32(jnp.inf), jnp.float32(0))
    _, low, *_ = lax.while_loop(is_unfinished, halve, state)
    return jnp.min(jnp.where(logits_V >= _from_ordered(low), logits_V, jnp.inf))


def _nucleus_mass(top_p: Array, total: Array) -> Array:
    # Never 0, so that the most probable token always stays.
    return jnp.maximum(top_p * total, jnp.finfo(jnp.float32).tiny)


def _to_ordered(value: Array) -> Array:
    """i32 that orders as the float32 values do (NaN excluded)."""
    bits = lax.bitcast_convert_type(value, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _from_ordered(ordered: Array) -> Array:
    return lax.bitcast_convert_type(jnp.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered), jnp.float32)
