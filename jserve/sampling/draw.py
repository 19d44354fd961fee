"""A random token of one row: counter-based uniforms, and the place where the running sum of weights reaches them.

The draw of a row depends on its seed, stream and position alone, never on its neighbours or on JAX's settings.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

MASS_CHUNK = 256
"""Ids a chunk where a draw lands: about the square root of a vocabulary, and whole vector rows on TPU."""


def uniforms(seed_words: Array, sample_index: Array, position: Array) -> Array:
    """f32[R, 2] in (0, 1), never 0 or 1: u32[R, 2] seeds (high word, low word), i32[R] streams, i32[R] positions.

    23 bits of each word of fold_in(fold_in(seed, sample_index), position), as jax.random's threefry2x32 has it.  A
    fold_in is one cipher block of the counter, so these words are the draw, and nothing else is derived from them.
    """
    stream = _fold_in(seed_words[:, 0], seed_words[:, 1], sample_index)
    bits = jnp.stack(_fold_in(*stream, position), axis=1)
    return ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23


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


def draw(logits_V: Array, maximum: Array, temperature: Array, threshold: Array, uniform: Array) -> Array:
    """i32[] id with probability weight / sum of weights, over the logits >= threshold; f32[2] uniform.

    Two steps in the order of ids, with a uniform each: the chunk by its mass, then the id inside the chunk.
    """
    logits_CP = jnp.pad(logits_V, (0, -logits_V.shape[0] % MASS_CHUNK), constant_values=-jnp.inf).reshape(-1, MASS_CHUNK)
    masses_C = jnp.sum(kept_weights(logits_CP, maximum, temperature, threshold), axis=1)
    chunk = _pick(masses_C, uniform[0])
    return chunk * MASS_CHUNK + _pick(kept_weights(logits_CP[chunk], maximum, temperature, threshold), uniform[1])


def kept_weights(logits: Array, maximum: Array, temperature: Array, threshold: Array) -> Array:
    """exp((logit - maximum) / temperature) where the logit reaches the threshold, else 0; at most 1."""
    # The maximum goes first: logits / 0.01 alone could leave float32.
    return jnp.where(logits >= threshold, jnp.exp((logits - maximum) / temperature), 0.0)


def running_sum(weights: Array) -> Array:
    """f32[N] sums of the first 1, 2, ... N weights.  One fused reduction, where cumsum becomes six programs on CPU."""
    places = jnp.arange(weights.shape[0])
    return jnp.sum(jnp.where(places[None, :] <= places[:, None], weights[None, :], 0.0), axis=1)


def _pick(weights: Array, uniform: Array) -> Array:
    """i32[] first index of weight above 0 whose running sum reaches uniform * total."""
    running = running_sum(weights)
    reached = jnp.where(running >= uniform * running[-1], jnp.inf, running)
    # Should rounding leave none that reaches it, the furthest is taken; never one of weight 0.
    return jnp.argmax(jnp.where(weights > 0, reached, -1.0)).astype(jnp.int32)
