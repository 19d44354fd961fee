"""Whether and how a model's heads and ffn divide over devices.  Arithmetic alone: the planner and the engine share it."""

from __future__ import annotations


def why_not(num_shards: int, *, num_heads: int, num_kv_heads: int, d_ff: int) -> str | None:
    """Why the model cannot be split that way, with the numbers; None where it can."""
    if num_shards < 1:
        return "must be at least 1"
    if num_heads % num_shards or d_ff % num_shards:
        return f"{num_heads} heads and an ffn of {d_ff} must both divide by it"
    if num_kv_heads % num_shards and num_shards % num_kv_heads:
        return f"{num_kv_heads} kv heads neither divide by it nor divide it"
    return None


def stored_kv_heads(num_kv_heads: int, num_shards: int) -> int:
    """Kv heads of all devices together: where there are fewer than devices, each is kept by several.

    >>> stored_kv_heads(8, 4), stored_kv_heads(2, 4)
    (8, 4)
    """
    return max(num_kv_heads, num_shards)
