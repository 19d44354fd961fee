"""The layer loop: the one place that decides how it is compiled, by platform.

Measured (device-less compiles, CPU runs): a scan over stacked weights compiles independently of depth, but on GPU it
copies every layer's weights out of the stack each step; a Python loop over the same arrays with a static index does
not.  On CPU both copy (the loop all layers at once), so the scan; only an array for each layer would avoid that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Carry = TypeVar("Carry")


def run_layers(
    layer: Callable[[Carry, Any, int, jax.Array | int], Carry],
    carry: Carry,
    weights: Any,
    group_of_layers: tuple[int, ...],
    platform: str,
) -> Carry:
    """Applies `layer(carry, weights of one layer, group, place in the group)` over axis 0 of every leaf of `weights`.

    The group is static.  Layers of several groups are scanned by whole periods of their pattern, and not at all where
    the pattern does not come out even.  What a layer writes in place (the KV pools) belongs in the carry.
    """
    num_layers, period = len(group_of_layers), _period(group_of_layers)
    places = tuple(group_of_layers[:at].count(group) for at, group in enumerate(group_of_layers))
    if platform == "gpu" or period == num_layers:
        for at, (group, place) in enumerate(zip(group_of_layers, places)):
            carry = layer(carry, jax.tree.map(lambda leaf: leaf[at], weights), group, place)
        return carry
    if period == 1:
        numbers = jnp.arange(num_layers, dtype=jnp.int32)
        carry, _ = jax.lax.scan(lambda c, xs: (layer(c, xs[1], 0, xs[0]), None), carry, (numbers, weights))
        return carry
    pattern = group_of_layers[:period]

    def one_period(carry: Carry, number_and_weights: Any) -> tuple[Carry, None]:
        number, weights = number_and_weights
        for at, group in enumerate(pattern):
            place = number * pattern.count(group) + places[at]
            carry = layer(carry, jax.tree.map(lambda leaf: leaf[at], weights), group, place)
        return carry, None

    by_period = jax.tree.map(lambda leaf: leaf.reshape(-1, period, *leaf.shape[1:]), weights)
    numbers = jnp.arange(num_layers // period, dtype=jnp.int32)
    carry, _ = jax.lax.scan(one_period, carry, (numbers, by_period))
    return carry


def _period(pattern: tuple[int, ...]) -> int:
    """The length of the shortest beginning of which the pattern is repetitions."""
    count = len(pattern)
    return next(n for n in range(1, count + 1) if count % n == 0 and pattern[:n] * (count // n) == pattern)
