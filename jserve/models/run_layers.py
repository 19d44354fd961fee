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
    layer: Callable[[Carry, Any, jax.Array | int], Carry],
    carry: Carry,
    weights: Any,
    platform: str,
) -> Carry:
    """Applies `layer(carry, weights of one layer, index)` over axis 0 of every leaf of `weights`.

    What a layer writes in place (the KV pool) belongs in the carry.
    """
    num_layers = jax.tree.leaves(weights)[0].shape[0]
    if platform == "gpu":
        for index in range(num_layers):
            carry = layer(carry, jax.tree.map(lambda leaf: leaf[index], weights), index)
        return carry
    indices = jnp.arange(num_layers, dtype=jnp.int32)
    carry, _ = jax.lax.scan(lambda c, xs: (layer(c, xs[1], xs[0]), None), carry, (indices, weights))
    return carry
