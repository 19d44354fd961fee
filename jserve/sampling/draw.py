"""A random token of one row: counter-based random numbers, and a race of the tokens against each other.

The draw of a row depends on its seed, stream and position alone, never on its neighbours or on JAX's settings.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

MASS_CHUNK = 256
"""Ids a chunk where a draw lands: about the square root of a vocabulary, and whole vector rows on TPU."""


def draw_keys(seed_words: Array, sample_index: Array, position: Array) -> Array:
    """u32[R, 2] keys: fold_in(fold_in(seed, sample_index), position), as jax.random's threefry2x32 has it.

    u32[R, 2] seeds (high word, low word), i32[R] streams, i32[R] positions.
    """
    stream = _fold_in(seed_words[:, 0], seed_words[:, 1], sample_index)
    return jnp.stack(_fold_in(*stream, position), axis=1)


def exponentials(key: Array, count: int) -> tuple[Array, Array]:
    """Two independent f32[count] of exponential variates from one u32[2] key: those of fold_in(key, i)'s two words.

    -log of a uniform in (0, 1) with 23 bits; never 0 and never infinite.
    """
    words = _fold_in(key[0], key[1], jnp.arange(count, dtype=jnp.int32))
    return tuple(-jnp.log(((word >> 9).astype(jnp.float32) + 0.5) * 2.0**-23) for word in words)


def _fold_in(key0: Array, key1: Array, counter: Array) -> tuple[Array, Array]:
    """jax.random.fold_in of threefry2x32 keys: Threefry-2x32 with 20 rounds (Salmon et al. 2011) of (0, counter).

    Written out because jax.random compiles to loops of small operations on CPU, which cost more than all of the rest.
    """
    keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = keys[0], counter.astype(jnp.uint32) + keys[1]
    for group in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x0 = x0 + x1
            x1 = x0 ^ ((x1 << rotation) | (x1 >> (32 - rotation)))
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1


def draw(logits_V: Array, maximum: Array, temperature: Array, threshold: Array, key: Array) -> Array:
    """i32[] id with probability weight / sum of weights, over the logits >= threshold; u32[2] key.

    Two exponential races (the least E / weight wins with probability weight / sum): the chunk by its mass, then the id
    inside the chunk.  Rounding changes the winner only where two candidates are that close; the place where a running
    sum passes a uniform would have a border at every id.
    """
    missing = -logits_V.shape[0] % MASS_CHUNK
    logits_CP = jnp.pad(logits_V, (0, missing), constant_values=-jnp.inf).reshape(-1, MASS_CHUNK)
    masses_C = jnp.sum(kept_weights(logits_CP, maximum, temperature, threshold), axis=1)
    between, inside = exponentials(key, max(logits_CP.shape))
    chunk = _first_home(masses_C, between[: logits_CP.shape[0]])
    weights_P = kept_weights(logits_CP[chunk], maximum, temperature, threshold)
    return chunk * MASS_CHUNK + _first_home(weights_P, inside[:MASS_CHUNK])


def kept_weights(logits: Array, maximum: Array, temperature: Array, threshold: Array) -> Array:
    """exp((logit - maximum) / temperature) where the logit reaches the threshold, else 0; at most 1."""
    # The maximum goes first: logits / 0.01 alone could leave float32.
    return jnp.where(logits >= threshold, jnp.exp((logits - maximum) / temperature), 0.0)


def _first_home(weights: Array, exponentials: Array) -> Array:
    """i32[] winner of the race; never one of weight 0."""
    return jnp.argmin(jnp.where(weights > 0, exponentials / weights, jnp.inf)).astype(jnp.int32)
