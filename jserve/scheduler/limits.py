"""What bounds a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerLimits:
    """What bounds a step."""

    max_num_batched_tokens: int
    """Token budget of one step."""
    max_num_seqs: int
    """Slots; more sequences than the token budget never run at once, so that every decode fits in every step."""
    token_buckets: tuple[int, ...]
    """Compiled sizes of mixed steps in tokens, ascending; the last one is max_num_batched_tokens."""
    sequence_buckets: tuple[int, ...]
    """Compiled sizes of steps in which every row has one token, ascending; the last one is num_slots."""
    step_cost_tokens: int = 32
    """What a step costs beyond its tokens, in tokens; decides between padding and splitting."""

    @property
    def num_slots(self) -> int:
        return min(self.max_num_seqs, self.max_num_batched_tokens)
