"""Times of day that never jump: the clock as it stood when the process started, carried on by the monotonic one.

A difference of two stamps is a duration, also where somebody sets the machine's clock between them.
"""

from __future__ import annotations

import time

_AHEAD = time.time() - time.monotonic()


def stamp() -> float:
    """Seconds since 1970."""
    return _AHEAD + time.monotonic()
