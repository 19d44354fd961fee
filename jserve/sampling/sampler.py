"""Logits to tokens, on the device: one pure function that the runner jits for each planned variant and row bucket.

A row's token depends on its own logits and inputs alone: never on its neighbours, its place or the bucket.
Order as API.md: masks, bias and penalties (`shaping`, a program of its own), temperature, min_p, top_k, top_p; logprobs
are of raw logits.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jserve.sampling.draw import draw, draw_keys
from jserve.sampling.limits import MIN_TEMPERATURE
from jserve.sampling.rows import each_row
from jserve.sampling.scores import TokenScores, hide_unreal, scan, score, token_logprob
from jserve.sampling.threshold import Filters, keep_threshold


class SamplerKind(enum.Enum):
    """What a batch needs; each kind also does what the ones before it do."""

    GREEDY = "greedy"
    """Every row takes its most probable token."""
    SAMPLE = "sample"
    """Some row draws: temperature, min_p, top_k, top_p."""


@dataclass(frozen=True)
class SamplerVariant:
    """One compiled form of the sampler; any batch can run under a larger one and gets the same tokens."""

    kind: SamplerKind
    logprobs: bool
    """Whether ranks and the most probable tokens are returned."""


VARIANTS = tuple(SamplerVariant(kind, logprobs) for kind in SamplerKind for logprobs in (False, True))
"""All that a compile plan may contain."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerInputs:
    """One row a sequence that gets a token this step; padding rows have is_used False."""

    temperature: Array  # f32[R], 0 is greedy, else >= 0.01
    top_k: Array  # i32[R], 0 is off
    top_p: Array  # f32[R], 1 is off
    min_p: Array  # f32[R], 0 is off
    seed: Array  # u32[R, 2], high and low word of the int64
    sample_index: Array  # i32[R], the stream: i of n
    position: Array  # i32[R], index of the token being generated, 0 the first after the prompt
    banned_ids: Array  # i32[R, K], EOS and stop ids while below min_tokens
    num_banned: Array  # i32[R], how many of them count
    is_used: Array  # bool[R]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerOutput:
    token_ids: Array  # i32[R], 0 in padding rows
    logprob: Array  # f32[R], of the chosen token in the model's own distribution
    is_sound: Array  # bool[R], False where logits were NaN, infinite or all masked: that request has failed
    scores: TokenScores | None  # set by variants with logprobs


def sample(
    logits: Array,
    inputs: SamplerInputs,
    variant: SamplerVariant,
    num_real_tokens: int | None = None,
    shaped: Array | None = None,
) -> SamplerOutput:
    """Tokens of f32[R, V] logits.  Ids from num_real_tokens on (rows that pad the embedding) are never returned.

    `shaped` are the logits that penalties and masks left, where some row has any; log-probabilities stay those of
    `logits`.  That some token is left in every row is the validator's promise; `is_sound` is False in a row where none is.
    """
    num_real_tokens = logits.shape[1] if num_real_tokens is None else num_real_tokens
    shaped = hide_unreal(logits if shaped is None else shaped, num_real_tokens)
    if variant.kind is SamplerKind.GREEDY:
        rows = _with_bans(lambda shaped: scan(logits, shaped, inputs.is_used), shaped, inputs)
    else:
        shaped = _with_bans(lambda shaped: shaped, shaped, inputs)
        rows = scan(logits, shaped, inputs.is_used)
    norm, maximum, token_ids = rows.norm, rows.maximum, rows.token_ids
    if variant.kind is not SamplerKind.GREEDY:
        keys = draw_keys(inputs.seed, inputs.sample_index, inputs.position)
        token_ids = each_row(_row_token, shaped, maximum, token_ids, inputs, keys)
    token_ids = jnp.where(inputs.is_used, token_ids, 0)

    return SamplerOutput(
        token_ids=token_ids,
        logprob=token_logprob(logits, token_ids, norm),
        is_sound=jnp.isfinite(norm.maximum + norm.log_mass) & jnp.isfinite(maximum),
        scores=score(logits, token_ids, norm, num_real_tokens) if variant.logprobs else None,
    )


def _row_token(logits_V: Array, maximum: Array, greedy_id: Array, inputs: SamplerInputs, key: Array) -> Array:
    """The id of one row that may draw; `inputs` are that row's."""

    def drawn():
        # XLA multiplies by the reciprocal, which beyond 1e38 would be 0; from 1e30 on every distribution is flat.
        temperature = jnp.clip(inputs.temperature, MIN_TEMPERATURE, 1e30)
        filters = Filters(temperature, inputs.min_p, inputs.top_k, inputs.top_p)
        threshold = keep_threshold(logits_V, maximum, filters)
        return draw(logits_V, maximum, temperature, threshold, key)

    return lax.cond(inputs.is_used & (inputs.temperature > 0), drawn, lambda: greedy_id)


def _with_bans(function: Callable[[Array], Any], logits: Array, inputs: SamplerInputs) -> Any:
    """function(logits with -inf at the banned ids).  In the common case, that no row bans any, nothing is copied but
    what `function` returns."""
    counts = jnp.where(inputs.is_used, inputs.num_banned, 0)
    columns = jnp.arange(inputs.banned_ids.shape[1])
    # Unused columns point beyond the vocabulary and are dropped; ids were checked to be inside at the edge.
    ids = jnp.where(columns < counts[:, None], inputs.banned_ids, logits.shape[1])
    rows = jnp.arange(logits.shape[0])[:, None]
    return lax.cond(
        jnp.any(counts > 0),
        lambda: function(logits.at[rows, ids].set(-jnp.inf, mode="drop")),
        lambda: function(logits),
    )
