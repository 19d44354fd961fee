"""Where the axes of pictures are marked."""

from __future__ import annotations

import math


def round_ticks(most: float, about: int = 5) -> list[float]:
    """About so many round numbers from 0 to `most`."""
    rough = most / about
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [round(step * k, 12) for k in range(int(most / step + 1e-9) + 1)]


def decades(lowest: float, highest: float) -> list[float]:
    """1, 2 and 5 times powers of ten within the range; only the powers where that would be too many."""
    exponents = range(math.floor(math.log10(lowest)), math.ceil(math.log10(highest)) + 1)
    factors = (1, 2, 5) if highest < 300 * lowest else (1,)
    found = [factor * 10.0**exponent for exponent in exponents for factor in factors]
    return [value for value in found if lowest <= value <= highest]
