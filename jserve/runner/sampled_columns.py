"""What samplers and the scorer hand to the host: one array of 32-bit columns, a row a token."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jserve.sampling.limits import MAX_LOGPROBS
from jserve.sampling.scores import TokenScores


def pack_columns(
    token_ids: jax.Array, logprobs: jax.Array, is_sound: jax.Array, scores: TokenScores | None
) -> jax.Array:
    """One row a token, read by SampledColumns; lists that a variant lacks are left out."""
    bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.int32)
    ranks = jnp.zeros_like(token_ids) if scores is None else scores.rank
    columns = [token_ids[:, None], bits(logprobs)[:, None], ranks[:, None], is_sound.astype(jnp.int32)[:, None]]
    if scores is not None:
        missing = ((0, 0), (0, MAX_LOGPROBS - scores.top_ids.shape[1]))  # a vocabulary of fewer tokens
        columns += [jnp.pad(scores.top_ids, missing), jnp.pad(bits(scores.top_logprobs), missing)]
    return jnp.concatenate(columns, axis=1)


@dataclass(frozen=True)
class SampledColumns:
    """The sampler's and scorer's packed output on the host: i32[R, 4 + 2 * MAX_LOGPROBS], floats by their bits."""

    packed: np.ndarray

    @property
    def token_ids(self) -> np.ndarray:
        return self.packed[:, 0]

    @property
    def logprobs(self) -> np.ndarray:
        return np.ascontiguousarray(self.packed[:, 1]).view(np.float32)

    @property
    def ranks(self) -> np.ndarray:
        return self.packed[:, 2]

    @property
    def is_sound(self) -> np.ndarray:
        """False where the logits were no numbers: that row's token means nothing."""
        return self.packed[:, 3] != 0

    @property
    def top_ids(self) -> np.ndarray:
        return self.packed[:, 4 : 4 + MAX_LOGPROBS]

    @property
    def top_logprobs(self) -> np.ndarray:
        return np.ascontiguousarray(self.packed[:, 4 + MAX_LOGPROBS :]).view(np.float32)
