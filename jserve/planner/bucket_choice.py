"""Which K bucket sizes pad least, given how often a step had each size: exact, by dynamic programming."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def choose_buckets(counts: Mapping[int, int], num_buckets: int, largest: int) -> tuple[int, ...]:
    """At most `num_buckets` sizes, ascending, the last one `largest`, of least padding in sum.

    A step of `size` tokens runs in the smallest bucket that holds it.  `counts[size]` says how many steps had it.

    >>> choose_buckets({3: 100, 10: 5, 16: 50}, 2, 16)
    (3, 16)
    """
    if num_buckets < 1:
        raise ValueError(f"num_buckets is {num_buckets}, expected at least 1")
    if counts and max(counts) > largest:
        raise ValueError(f"a step of {max(counts)} tokens, but the largest bucket is {largest}")
    sizes = np.array(sorted({*(size for size in counts if size < largest), largest}))
    weights = np.array([counts.get(int(size), 0) for size in sizes], float)
    num_steps = np.concatenate([[0], np.cumsum(weights)])
    num_tokens = np.concatenate([[0], np.cumsum(weights * sizes)])
    # least[j]: least padding of the steps with the j smallest sizes, the last bucket being size j.
    count = len(sizes)
    least = np.full(count + 1, np.inf)
    least[0] = 0
    chosen: list[np.ndarray] = []
    for _ in range(min(num_buckets, count)):
        following, before = np.full(count + 1, np.inf), np.zeros(count + 1, int)
        for end in range(1, count + 1):
            padding = sizes[end - 1] * (num_steps[end] - num_steps[:end]) - (num_tokens[end] - num_tokens[:end])
            total = least[:end] + padding
            before[end] = int(np.argmin(total))
            following[end] = total[before[end]]
        following[0] = 0
        least = following
        chosen.append(before)
    buckets, end = [], count
    for before in reversed(chosen):
        if end == 0:
            break
        buckets.append(int(sizes[end - 1]))
        end = int(before[end])
    return tuple(sorted(buckets))


def padding_of(counts: Mapping[int, int], buckets: tuple[int, ...]) -> tuple[int, int]:
    """(tokens, padding) of all steps in these buckets."""
    sizes, weights = np.array(list(counts), int), np.array(list(counts.values()), int)
    held = np.array(buckets)[np.searchsorted(buckets, sizes)]
    return int((sizes * weights).sum()), int(((held - sizes) * weights).sum())
