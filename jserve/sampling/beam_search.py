"""Beam search on the host: which beams go on and which hypotheses are kept, after HF transformers' `num_beams`.

Sees log-probabilities and token ids only; where a beam's KV lies is the scheduler's business.  One object a request.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jserve.request import EarlyStopping, FinishReason, Sampling

NUM_CANDIDATES = 128
"""Most probable tokens of each beam that a step needs: as many as beams may be, and as ids may be banned or end a beam."""


@dataclass(frozen=True)
class BeamToken:
    """A token of a beam, and through `parent` all tokens before it; beams share their beginnings."""

    parent: BeamToken | None
    token_id: int
    logprob: float
    rank: int
    top_ids: np.ndarray  # i32[sampling.logprobs]
    top_logprobs: np.ndarray  # f32[sampling.logprobs]

    def path(self) -> list[BeamToken]:
        """From the first token to this one."""
        tokens, token = [], self
        while token is not None:
            tokens.append(token)
            token = token.parent
        return tokens[::-1]


@dataclass(frozen=True)
class Hypothesis:
    """A beam that has ended."""

    last: BeamToken
    logprob: float
    """Sum over its tokens, EOS included."""
    score: float
    reason: FinishReason
    matched_stop: int | str | None


@dataclass(frozen=True)
class Candidates:
    """The most probable tokens behind one beam, best first."""

    token_ids: np.ndarray  # i32[n]
    logprobs: np.ndarray  # f32[n]


@dataclass(frozen=True)
class Move:
    """A beam of the next step: the beam of this step that it continues, and its new token."""

    parent: int
    token_id: int


@dataclass(frozen=True)
class _Beam:
    logprob: float
    last: BeamToken | None


class BeamSearch:
    """Invariant: the running beams are ordered, the most probable first, and of equal length."""

    def __init__(self, sampling: Sampling, find_stop: Callable[[list[int]], str | None] | None = None):
        """find_stop: the stop string that the last of these output ids completes; None: there are no stop strings."""
        self._sampling = sampling
        self._find_stop = find_stop
        self._stop_ids = sampling.stop_token_ids | sampling.eos_token_ids
        self._beams = [_Beam(0.0, None)]
        self._num_tokens = 0
        self._ended: list[Hypothesis] = []  # at most beam_width, best first
        self._reports: dict[int, Candidates] = {}

    @property
    def num_beams(self) -> int:
        return len(self._beams)

    def has_report(self, beam: int) -> bool:
        return beam in self._reports

    def report(self, beam: int, candidates: Candidates) -> None:
        """What the model gives for one of the running beams."""
        self._reports[beam] = candidates

    def forget_reports(self) -> None:
        """The running beams will be computed again."""
        self._reports.clear()

    @property
    def is_due(self) -> bool:
        """Every running beam has been reported."""
        return len(self._reports) == len(self._beams)

    def advance(self) -> list[Move]:
        """One step of the search; the beams that go on, none where it has ended."""
        sampling, width = self._sampling, self._sampling.beam_width
        self._num_tokens += 1
        moves: list[Move] = []
        beams: list[_Beam] = []
        ended = []
        for place, (total, parent, at) in enumerate(self._ranked()):
            if len(beams) == width and place >= width:
                break
            candidates = self._reports[parent]
            last = self._token(self._beams[parent].last, candidates, at)
            reason, matched = self._end_of(last)
            if reason is None:
                if len(beams) < width:
                    beams.append(_Beam(total, last))
                    moves.append(Move(parent, last.token_id))
            elif place < width:  # what ends further down would not have been among the beams
                ended.append(Hypothesis(last, total, total / self._num_tokens**sampling.length_penalty, reason, matched))
        self._ended = sorted(self._ended + ended, key=lambda one: -one.score)[:width]
        self._reports.clear()
        self._beams = beams
        return moves if beams and not self._is_done() else []

    def cut(self) -> None:
        """The search ends here for want of memory: the running beams count as they are."""
        penalty = self._sampling.length_penalty
        cut = [
            Hypothesis(beam.last, beam.logprob, beam.logprob / self._num_tokens**penalty, FinishReason.LENGTH, None)
            for beam in self._beams
            if beam.last is not None
        ]
        self._ended = sorted(self._ended + cut, key=lambda one: -one.score)[: self._sampling.beam_width]

    def best(self) -> list[Hypothesis]:
        """The n best hypotheses, best first."""
        return self._ended[: self._sampling.n]

    def _ranked(self):
        """(sum of log-probabilities, beam, place among its candidates), the largest sum first; equal ones by beam."""
        below_floor = self._num_tokens <= self._sampling.min_tokens
        banned = self._sampling.banned_below_min_tokens if below_floor else ()
        lists = []
        for number, beam in enumerate(self._beams):
            candidates = self._reports[number]
            allowed = np.flatnonzero(~np.isin(candidates.token_ids, banned)).tolist()
            lists.append([(-(beam.logprob + float(candidates.logprobs[at])), number, at) for at in allowed])
        return ((-total, number, at) for total, number, at in heapq.merge(*lists))

    def _token(self, parent: BeamToken | None, candidates: Candidates, at: int) -> BeamToken:
        k = self._sampling.logprobs or 0
        return BeamToken(
            parent, int(candidates.token_ids[at]), float(candidates.logprobs[at]), at + 1,
            candidates.token_ids[:k], candidates.logprobs[:k],
        )

    def _end_of(self, last: BeamToken) -> tuple[FinishReason | None, int | str | None]:
        """Why a beam ends with this token, and the stop id or string that it matched."""
        sampling = self._sampling
        counts = self._num_tokens > sampling.min_tokens
        if counts and last.token_id in self._stop_ids:
            return FinishReason.STOP, None if last.token_id in sampling.eos_token_ids else last.token_id
        if counts and self._find_stop is not None:
            stop = self._find_stop([token.token_id for token in last.path()])
            if stop is not None:
                return FinishReason.STOP, stop
        return (FinishReason.LENGTH, None) if self._num_tokens >= sampling.max_tokens else (None, None)

    def _is_done(self) -> bool:
        """Whether no running beam can come among the ended ones, by the rule that was asked for."""
        sampling = self._sampling
        if len(self._ended) < sampling.beam_width:
            return False
        if sampling.early_stopping is EarlyStopping.FIRST:
            return True
        # What is ahead can at best keep its sum; with a positive penalty the longest output divides it by the most.
        looks_ahead = sampling.early_stopping is EarlyStopping.NEVER and sampling.length_penalty > 0
        length = sampling.max_tokens if looks_ahead else self._num_tokens
        return self._beams[0].logprob / length**sampling.length_penalty <= self._ended[-1].score


def stop_finder(make_stream: Callable[[], object]) -> Callable[[list[int]], str | None]:
    """find_stop from TextStreams; `make_stream` gives a new one."""

    def find(token_ids: Sequence[int]) -> str | None:
        return make_stream().push(token_ids).matched_stop

    return find
