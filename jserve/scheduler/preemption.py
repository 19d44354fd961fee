"""How a sequence makes room for others: its KV is dropped and recomputed later, or moved to host memory and back."""

from __future__ import annotations

from dataclasses import dataclass

from jserve.scheduler.step_time import StepTimeModel

KINDS = ("auto", "recompute", "swap")


@dataclass(frozen=True)
class PreemptionSettings:
    """Which way is taken."""

    kind: str = "auto"
    """auto: what is estimated to take less time; recompute or swap: always that, where it can be done."""
    swap_block_s: float = 0.0
    """Seconds that a block takes to or from host memory, measured at start."""

    def prefers_swap(self, num_tokens: int, num_blocks: int, step_time: StepTimeModel) -> bool:
        """For sequences whose num_tokens tokens would be recomputed, or num_blocks blocks moved out and back."""
        if self.kind != "auto":
            return self.kind == "swap"
        recompute_s = step_time.first_token_s(num_tokens)
        return recompute_s is not None and 2 * num_blocks * self.swap_block_s < recompute_s
