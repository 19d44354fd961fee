"""StepPlan: what one step computes, decided on the host; the runner turns it into arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jserve.request import RequestError
from jserve.scheduler.sequence import Sequence


@dataclass(frozen=True)
class StepPlan:
    """Rows of one step, those with a single token first.  All arrays have one entry a row."""

    step_id: int
    sequences: list[Sequence]
    slots: np.ndarray  # i32[rows]
    epochs: np.ndarray  # i32[rows] which occupant of the slot the row belongs to
    num_scheduled: np.ndarray  # i32[rows] tokens granted, at least 1
    first_positions: np.ndarray  # i32[rows] absolute position of the first granted token
    samples: np.ndarray  # bool[rows] the row's last granted token is its last known: a new token is sampled after it
    sampling_rows: np.ndarray  # i32[sampled] the rows that sample, ascending
    beams: np.ndarray  # i[beams] those of the sampling rows whose candidates go to a beam search on the host
    feeds: np.ndarray  # bool[rows] the row's one token is the one its slot sampled last; its id may not be on the host yet
    output_index: np.ndarray  # i32[rows] index, within the output, of the token that the row samples
    num_decodes: int  # rows with exactly one token, all in front
    num_tokens: int  # sum of num_scheduled
    bucket: int  # tokens that the compiled step takes, padding included
    admitted: list[Sequence]  # sequences that entered their slot in this step
    has_prompt_only: bool  # some row belongs to a request of no output tokens
    # To be done before the step's writes, in this order:
    saves: list[tuple[int, int, int]]  # (layer group, block, host block)
    copies: list[tuple[int, int, int]]  # (layer group, source block, destination block)
    loads: list[tuple[int, int, int]]  # (layer group, host block, block)
    poisoned: list[tuple[int, int]]  # (layer group, block) that hold nothing any more; to be overwritten, for debugging

    @property
    def num_rows(self) -> int:
        return len(self.sequences)

    def sampled_sequences(self) -> list[Sequence]:
        """Of the sampling rows, in order; a new list."""
        if len(self.sampling_rows) == len(self.sequences):
            return list(self.sequences)
        return [self.sequences[row] for row in self.sampling_rows.tolist()]

    @property
    def decode_only(self) -> bool:
        """Every row has one token: the bucket counts rows."""
        return self.num_decodes == len(self.sequences)


@dataclass
class StepOutput:
    """What came back from the device for one plan; row arrays follow the plan's sampling rows, in order."""

    step_id: int
    token_ids: np.ndarray  # i32[sampled]
    is_sound: np.ndarray | None = None  # bool[sampled] False: the logits were no numbers; None: all are sound
    logprobs: np.ndarray | None = None  # f32[sampled] of the chosen tokens; None: no row asked
    ranks: np.ndarray | None = None  # i32[sampled]
    top_ids: np.ndarray | None = None  # i32[sampled, 20]
    top_logprobs: np.ndarray | None = None  # f32[sampled, 20]
    errors: dict[int, RequestError] | None = None  # of sampled rows (by place in token_ids) that cannot go on
    forced: dict[int, list[int]] | None = None
    """Of sampled rows (by place in token_ids): the sampled id, and those that must follow it and need no sampling."""
    beam_ids: np.ndarray | None = None  # i32[plan.beams, 128] the most probable tokens of each, best first
    beam_logprobs: np.ndarray | None = None  # f32[plan.beams, 128]; no numbers: the row is not sound
    prompt_scores: list[PromptScores] | None = None
    pooled: list[PooledStates] | None = None
    device_seconds: float = 0.0


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of consecutive prompt tokens of one row: entry i scores the token at position first + i."""

    row: int
    first: int
    logprobs: np.ndarray  # f32[count]
    ranks: np.ndarray  # i32[count]
    top_ids: np.ndarray  # i32[count, 20]
    top_logprobs: np.ndarray  # f32[count, 20]


@dataclass(frozen=True)
class PooledStates:
    """Sum of the final hidden states of consecutive prompt tokens of one row, from position `first`."""

    row: int
    first: int
    count: int
    total: np.ndarray  # f32[D]
