"""How long a step takes, learnt while serving: linear in its tokens, in the context it reads, and in their product.

The scheduler asks how many tokens keep a step within a target; admission asks how soon a prompt can be answered.
"""

from __future__ import annotations

import numpy as np

from jserve.scheduler.plan import StepPlan

FORGET = 0.99
"""Weight of a step once another has come: the last hundred or so count."""
NUM_SAMPLES_NEEDED = 8
SCALES = np.array([1.0, 1e-3, 1e-6, 1e-6])
"""Of the features: constant, tokens, context tokens, chunk tokens times the context before them."""


class StepTimeModel:
    """Exponentially forgetting least squares over four features, and how far it was off lately."""

    def __init__(self, fits: bool):
        """fits: `bucket_within` will be asked, so that the four weights are worth learning."""
        self._fits = fits
        self._moments = np.eye(4) * 1e-6
        self._products = np.zeros(4)
        self._weights = np.zeros(4)
        self._is_stale = False
        self._excess = 1.0
        self._mixed_tokens = self._mixed_seconds = 0.0
        self._decode_seconds = 0.0
        self.num_samples = 0

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step of the plan took `seconds` on the device."""
        if seconds <= 0:
            return
        self.num_samples += 1
        if plan.decode_only:
            self._decode_seconds += 0.1 * (seconds - self._decode_seconds) if self._decode_seconds else seconds
        else:
            self._mixed_tokens = FORGET * self._mixed_tokens + plan.num_tokens
            self._mixed_seconds = FORGET * self._mixed_seconds + seconds
        if self._fits:
            self._fit(_features(plan.bucket, *_reads(plan)), seconds, is_mixed=not plan.decode_only)

    def _fit(self, features: np.ndarray, seconds: float, is_mixed: bool) -> None:
        if self.num_samples > NUM_SAMPLES_NEEDED and is_mixed:
            predicted = self._predict(features)
            if predicted > 0:
                self._excess = min(1.5, max(1.0, 1 + (self._excess - 1) * 0.97, seconds / predicted))
        self._moments = FORGET * self._moments + np.outer(features, features)
        self._products = FORGET * self._products + features * seconds
        self._is_stale = True

    def bucket_within(
        self, target_s: float, buckets: tuple[int, ...], num_decodes: int, decode_context: int, past: int
    ) -> int:
        """The largest bucket whose step keeps the target beside the decodes; at least one that computes some prefill.

        Args:
          decode_context: tokens that the decodes read.
          past: computed tokens of the sequence whose chunk fills the rest.
        """
        candidates = [size for size in buckets if size > num_decodes] or [buckets[-1]]
        if self.num_samples < NUM_SAMPLES_NEEDED:
            careful = num_decodes + buckets[-1] // 4
            return next((size for size in candidates if size >= careful), candidates[-1])
        best = candidates[0]
        for size in candidates:
            chunk = size - num_decodes
            features = _features(size, decode_context + past + chunk, chunk * (past + chunk / 2))
            if self._predict(features) * self._excess > target_s:
                break
            best = size
        return best

    def first_token_s(self, num_tokens: int) -> float | None:
        """Seconds until so many tokens are computed, at the rate of late; None while nothing is known."""
        if self._mixed_seconds == 0:
            return None
        return num_tokens * self._mixed_seconds / self._mixed_tokens

    @property
    def decode_s(self) -> float:
        """Seconds of a step of decodes alone, of late; 0 while nothing is known."""
        return self._decode_seconds

    def _predict(self, features: np.ndarray) -> float:
        if self._is_stale:
            ridge = np.eye(4) * 1e-6 * max(1e-9, float(np.trace(self._moments)))
            self._weights = np.maximum(np.linalg.solve(self._moments + ridge, self._products), 0.0)
            self._is_stale = False
        return float(features @ self._weights)


def _features(num_tokens: int, context: float, pairs: float) -> np.ndarray:
    return SCALES * (1.0, num_tokens, context, pairs)


def _reads(plan: StepPlan) -> tuple[float, float]:
    """(tokens of context that all rows read, chunk tokens times the context before them)."""
    context = float((plan.first_positions + plan.num_scheduled).sum())
    first = plan.num_decodes
    granted = plan.num_scheduled[first:].astype(float)
    pairs = float((granted * (plan.first_positions[first:] + granted / 2)).sum())
    return context, pairs
