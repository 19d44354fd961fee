"""Log-probabilities of the model's own distribution: of one token a row, its rank, and the most probable tokens.

Everything here reads raw logits, before bans, penalties and temperature.  Shapes: R rows, V vocabulary, C chunks.
No sort and no top-k over V: a maximum of each chunk first, then only the chunks that can matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from jserve.sampling.limits import MAX_LOGPROBS
from jserve.sampling.rows import each_row
from pallas_kernels.cpu.ops import scan_rows, serves_scan

LOGPROB_FLOOR = -9999.0
"""What stands for -inf, which is never sent."""
SEARCH_CHUNK = 128
"""Ids a chunk where the best are searched: one vector row on TPU, where narrower chunks cost four times the memory."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenScores:
    """What a client that asked for logprobs gets for one token a row; L = min(20, V)."""

    logprob: Array  # f32[R], of the chosen token, >= LOGPROB_FLOOR
    rank: Array  # i32[R], 1 is the most probable; equal logits rank by id
    top_ids: Array  # i32[R, L], most probable first, equal logits by id
    top_logprobs: Array  # f32[R, L], >= LOGPROB_FLOOR


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Normalizer:
    """What makes logits log-probabilities: logit - maximum - log_mass."""

    maximum: Array  # f32[R]
    log_mass: Array  # f32[R], log of the sum of exp(logit - maximum), 0 or more


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowScan:
    """What the sampler needs to know of every row."""

    norm: Normalizer  # of the model's own logits
    maximum: Array  # f32[R], of the shaped ones
    token_ids: Array  # i32[R], the lowest id that has it


def scan(logits: Array, shaped: Array, is_used: Array) -> RowScan:
    """Of f32[R, V] logits; rows that are not used get anything.

    On CPUs that have it by a kernel of our own: XLA takes a row of 49,152 logits through four passes, on one core.
    """
    if not serves_scan(logits):
        return _scan(logits, shaped, is_used)
    return lax.platform_dependent(logits, shaped, is_used, cpu=_scan_by_kernel, default=_scan)


def _scan(logits: Array, shaped: Array, is_used: Array) -> RowScan:
    return RowScan(each_row(_row_normalizer, logits), *_most_probable(shaped))


def _scan_by_kernel(logits: Array, shaped: Array, is_used: Array) -> RowScan:
    maximum, mass, best, token_ids = scan_rows(logits, shaped, is_used)
    return RowScan(Normalizer(maximum, jnp.log(mass)), best, token_ids)


def _most_probable(logits: Array) -> tuple[Array, Array]:
    """(maximum f32[R], its lowest id i32[R]); several times faster on CPU than argmax over the vocabulary."""
    chunks = chunked(logits, SEARCH_CHUNK)
    maxima = jnp.max(chunks, axis=2)
    first = jnp.argmax(maxima, axis=1).astype(jnp.int32)
    inside = jnp.take_along_axis(chunks, first[:, None, None], axis=1)[:, 0]
    return jnp.max(maxima, axis=1), first * SEARCH_CHUNK + jnp.argmax(inside, axis=1).astype(jnp.int32)


def normalizer(logits: Array) -> Normalizer:
    """Of f32[R, V] logits."""
    return scan(logits, logits, jnp.ones(logits.shape[0], bool)).norm


def _row_normalizer(logits_V: Array) -> Normalizer:
    maximum = jnp.max(logits_V)
    return Normalizer(maximum, jnp.log(jnp.sum(jnp.exp(logits_V - maximum))))


def score(logits: Array, token_ids: Array, norm: Normalizer, num_real_tokens: int) -> TokenScores:
    """Scores of f32[R, V] logits at i32[R] ids.  Ranks and top lists leave out ids from num_real_tokens on."""
    real = hide_unreal(logits, num_real_tokens)
    top_values, top_ids = largest(real, min(MAX_LOGPROBS, num_real_tokens))
    top_logprobs = top_values - norm.maximum[:, None] - norm.log_mass[:, None]
    return TokenScores(
        logprob=token_logprob(logits, token_ids, norm),
        rank=_rank(real, token_ids),
        top_ids=top_ids,
        top_logprobs=jnp.maximum(top_logprobs, LOGPROB_FLOOR),
    )


def token_logprob(logits: Array, token_ids: Array, norm: Normalizer) -> Array:
    """f32[R] natural log-probabilities of i32[R] ids; never positive, never below LOGPROB_FLOOR."""
    value = jnp.take_along_axis(logits, token_ids[:, None], axis=1)[:, 0]
    return jnp.maximum(value - norm.maximum - norm.log_mass, LOGPROB_FLOOR)


def hide_unreal(logits: Array, num_real_tokens: int) -> Array:
    """-inf for the ids that no tokenizer knows (rows that pad the embedding)."""
    if num_real_tokens == logits.shape[1]:
        return logits
    return jnp.where(lax.broadcasted_iota(jnp.int32, logits.shape, 1) < num_real_tokens, logits, -jnp.inf)


def largest(logits: Array, count: int, chunk_size: int = SEARCH_CHUNK) -> tuple[Array, Array]:
    """(values f32[R, count], ids i32[R, count]) of the largest logits, equal ones by id; 2-3x faster than lax.top_k.

    The `count` chunks with the largest maxima (equal ones: the first) hold them all: each of these chunks has an
    element that no element outside of them precedes.
    """
    chunks = chunked(logits, chunk_size)
    num_rows, num_chunks, _ = chunks.shape
    if num_chunks <= count:
        return _top_k(logits, count)
    _, chosen = _top_k(jnp.max(chunks, axis=2), count)
    chosen = jnp.sort(chosen, axis=1)  # by id again, so that ties stay ties by id
    candidates = jnp.take_along_axis(chunks, chosen[:, :, None], axis=1).reshape(num_rows, -1)
    values, places = _top_k(candidates, count)
    ids = jnp.take_along_axis(chosen, places // chunk_size, axis=1) * chunk_size + places % chunk_size
    return values, ids


def _top_k(rows: Array, count: int) -> tuple[Array, Array]:
    # lax.top_k puts 0.0 before -0.0; here they are equal, as everywhere else.
    rows = jnp.where(rows == 0, 0.0, rows)
    # Without the barrier a caller that slices the result gets a full sort on CPU, ten times slower: XLA moves the
    # slice into the pattern by which it would recognise a top-k.  One for each result: XLA's partitioner for several
    # devices aborts the process over one barrier for both.
    values, places = lax.top_k(rows, count)
    return lax.optimization_barrier(values), lax.optimization_barrier(places)


def chunked(rows: Array, size: int, fill: float = -jnp.inf) -> Array:
    """[R, V] as [R, C, size], the last chunk filled up."""
    num_rows, width = rows.shape
    missing = -width % size
    if missing:
        rows = jnp.pad(rows, ((0, 0), (0, missing)), constant_values=fill)
    return rows.reshape(num_rows, -1, size)


def _rank(logits: Array, token_ids: Array) -> Array:
    value = jnp.take_along_axis(logits, token_ids[:, None], axis=1)
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    before = (logits > value) | ((logits == value) & (ids < token_ids[:, None]))
    return 1 + jnp.sum(before, axis=1, dtype=jnp.int32)
