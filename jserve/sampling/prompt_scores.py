"""prompt_logprobs: scores of the tokens that stand in a prompt, a fixed chunk of positions at a time.

The runner supplies the logits of C positions; memory is one f32[C, V] block whatever the prompt's length.
"""

from __future__ import annotations

from jax import Array

from jserve.sampling.scores import TokenScores, normalizer, score


def score_positions(logits: Array, targets: Array, num_real_tokens: int | None = None) -> TokenScores:
    """Scores of f32[C, V] logits at i32[C] targets: row i of `logits` predicts `targets[i]`, the token one place later.

    Padding rows may hold any logits and any target below V; their scores mean nothing.
    """
    num_real_tokens = logits.shape[1] if num_real_tokens is None else num_real_tokens
    return score(logits, targets, normalizer(logits), num_real_tokens)
