"""Buckets: the finite list of step sizes that are compiled, and the choice of one that wastes least.

A step of `n` tokens runs in the smallest bucket that holds it.  Where that bucket would be padded more than a second,
smaller step would cost, the step takes only as much prefill as fills the bucket below exactly.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right


def powers_up_to(smallest: int, largest: int) -> tuple[int, ...]:
    """smallest, 2 * smallest, ... below largest, then largest itself.

    >>> powers_up_to(16, 100)
    (16, 32, 64, 100)
    """
    sizes = []
    size = min(smallest, largest)
    while size < largest:
        sizes.append(size)
        size *= 2
    return tuple(sizes) + (largest,)


def default_token_buckets(budget: int) -> tuple[int, ...]:
    """Sizes of mixed steps where the config names none: doubles from 16, and 3/8 of a budget of 512 or more.  A prompt
    beside many decodes often falls between a quarter and a half of the budget: under a closed loop of 64 clients with
    prompts of 128 tokens this one size halves the padding (6.2 to 3.0 % of what is computed).

    >>> default_token_buckets(512)
    (16, 32, 64, 128, 192, 256, 512)
    """
    return tuple(sorted({*powers_up_to(16, budget), *((3 * budget // 8,) if budget >= 512 else ())}))


def default_sequence_buckets(num_slots: int) -> tuple[int, ...]:
    """Sizes of decode steps where the config names none: one row, for a lone stream, then 8 and its doubles.  Rows
    below 8 are cheap: a step reads all weights anyhow, and a TPU's registers hold 8 rows.

    >>> default_sequence_buckets(48)
    (1, 8, 16, 32, 48)
    """
    return tuple(sorted({1, *powers_up_to(min(8, num_slots), num_slots)}))


def bucket_for(buckets: tuple[int, ...], needed: int) -> int:
    """The smallest bucket that holds `needed`.

    Raises:
      ValueError: no bucket is large enough, which is a bug of the caller.
    """
    at = bisect_left(buckets, needed)
    if at == len(buckets):
        raise ValueError(f"{needed} exceeds the largest bucket {buckets[-1]}")
    return buckets[at]


def num_tokens_to_run(buckets: tuple[int, ...], wanted: int, least: int, step_cost_tokens: int) -> int:
    """How many of `wanted` tokens to run now: all, or as many as fill the bucket below.

    Args:
      buckets: token buckets, ascending.
      wanted: tokens that could run in this step; at most the largest bucket.
      least: tokens that must run in this step (decodes, and one more where a prefill is to progress).
      step_cost_tokens: what a step costs beyond its tokens, in tokens (launching it, reading the weights once).
    """
    above = bucket_for(buckets, wanted)
    at = bisect_right(buckets, wanted)
    if above == wanted or at == 0 or buckets[at - 1] < least:
        return wanted
    below = buckets[at - 1]
    rest = bucket_for(buckets, wanted - below)
    return below if below + rest + step_cost_tokens < above else wanted
