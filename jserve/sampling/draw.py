"""One random token a row: a counter-based uniform, and the place where the running sum of weights passes it.

The draw of a row depends on its seed, stream and position alone, never on its neighbours or on JAX's settings.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jserve.sampling.scores import MASS_CHUNK, chunked


def uniforms(seed_words: Array, sample_index: Array, position: Array) -> Array:
    """f32[R, 2] in (0, 1), never 0 or 1: u32[R, 2] seeds (high word, low word), i32[R] streams, i32[R] positions.

    The two words of threefry2x32's key after fold_in(fold_in(seed, sample_index), position), 23 bits of each: a
    fold_in is one cipher block of the counter, so these words are the draw and nothing else is derived from them.
    """

    def words(seed, stream, at):
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, stream), at))

    bits = jax.vmap(words)(seed_words, sample_index, position)
    return ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23


def chunk_masses(logits: Array, maximum: Array, temperature: Array, threshold: Array) -> Array:
    """f32[R, C]: weight of each chunk of MASS_CHUNK ids, exp((logit - maximum) / temperature) where kept."""
    return jnp.sum(chunked(_weights(logits, maximum, temperature, threshold), MASS_CHUNK, fill=0.0), axis=2)


def draw(logits: Array, maximum: Array, temperature: Array, threshold: Array, masses: Array, uniform: Array) -> Array:
    """i32[R] ids, each with probability weight / sum of weights over the logits >= threshold f32[R].

    Two steps in the order of ids, with a uniform each: the chunk by its mass, then the id inside the chunk.
    """
    chunk = _pick(masses, uniform[:, 0], fallback=masses)
    inside = jnp.take_along_axis(chunked(logits, MASS_CHUNK), chunk[:, None, None], axis=1)[:, 0]
    weights = _weights(inside, maximum, temperature, threshold)
    return chunk * MASS_CHUNK + _pick(weights, uniform[:, 1], fallback=inside)


def _weights(logits: Array, maximum: Array, temperature: Array, threshold: Array) -> Array:
    # The maximum goes first: logits / 0.01 alone could leave float32, and a maximum of 0 makes every weight <= 1.
    weights = jnp.exp((logits - maximum[:, None]) / temperature[:, None])
    return jnp.where(logits >= threshold[:, None], weights, 0.0)


def _pick(weights: Array, uniform: Array, fallback: Array) -> Array:
    """First index whose running sum passes uniform * total; never one of weight 0.

    Rounded running sums need not grow evenly, hence the test of the weight; where none is found (the uniform next to
    1, or weights that all vanish) the largest fallback is taken.
    """
    running = jnp.cumsum(weights, axis=1)
    passed = (running > uniform[:, None] * running[:, -1:]) & (weights > 0)
    return jnp.where(jnp.any(passed, axis=1), jnp.argmax(passed, axis=1), jnp.argmax(fallback, axis=1))
