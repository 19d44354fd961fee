"""How a function of one row is applied to a batch of rows, by platform.

Float32 sums depend on the order that a compiler picks for a shape, so sums over a vocabulary are written for one row.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax


def each_row(function: Callable, *arrays):
    """function applied along the first axis of every array (or tree of arrays), results stacked.

    On CPU one row after the other: a row then gets the same bits in every batch, its logits stay in a core's cache, and
    a `lax.cond` inside spares rows the work that they do not ask for.  Elsewhere all rows at once.
    """
    return lax.platform_dependent(
        *arrays,
        cpu=lambda *arrays: lax.map(lambda row: function(*row), arrays),
        default=jax.vmap(function),
    )
