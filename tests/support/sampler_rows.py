"""Rows of tests/sampling/reference.py as the device sampler's inputs, and the sampler jitted by shape."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jserve.sampling.sampler import SamplerInputs, SamplerKind, SamplerOutput, SamplerVariant, sample
from jserve.sampling.shaping import ShapingInputs, num_words, shape
from tests.sampling.reference import Row

GREEDY = SamplerVariant(SamplerKind.GREEDY, logprobs=False)
SAMPLE = SamplerVariant(SamplerKind.SAMPLE, logprobs=False)
SAMPLE_LOGPROBS = SamplerVariant(SamplerKind.SAMPLE, logprobs=True)
NUM_BANNED = 64


def run(
    logits, rows: list[Row], variant=SAMPLE, num_rows: int | None = None, num_real_tokens=None, shaped: bool = False
) -> SamplerOutput:
    """Samples len(rows) rows in a bucket of num_rows (16 or 64 unless given); numpy, without the padding rows.

    Penalties and masks come first where a row asks for any, or with `shaped`.  Padding rows get NaN logits, so that anything they touch would show.
    """
    num_rows = num_rows or (16 if len(rows) <= 16 else 64)
    padded = np.full((num_rows, np.shape(logits)[1]), np.nan, np.float32)
    padded[: len(rows)] = logits
    after = padded
    if shaped or any(row.is_shaped for row in rows):
        after = _shape(padded, shaping_inputs(rows, num_rows, padded.shape[1]))
    out = _jitted(variant, num_real_tokens)(padded, sampler_inputs(rows, num_rows), after)
    return jax.tree.map(lambda array: np.asarray(array)[: len(rows)], out)


@functools.cache
def _jitted(variant, num_real_tokens):
    return jax.jit(lambda logits, inputs, shaped: sample(logits, inputs, variant, num_real_tokens, shaped))


_shape = jax.jit(shape)


def sampler_inputs(rows: list[Row], num_rows: int) -> SamplerInputs:
    def column(values, dtype, fill):
        array = np.full((num_rows, *np.shape(fill)), fill, dtype)
        array[: len(rows)] = values
        return array

    banned = np.zeros((num_rows, NUM_BANNED), np.int32)
    for index, row in enumerate(rows):
        banned[index, : len(row.banned)] = row.banned
    return SamplerInputs(
        temperature=column([row.temperature for row in rows], np.float32, 1.0),
        top_k=column([row.top_k for row in rows], np.int32, 3),
        top_p=column([row.top_p for row in rows], np.float32, 0.5),
        min_p=column([row.min_p for row in rows], np.float32, 0.0),
        seed=column([seed_words(row.seed) for row in rows], np.uint32, (0, 0)),
        sample_index=column([row.sample_index for row in rows], np.int32, 0),
        position=column([row.position for row in rows], np.int32, 0),
        banned_ids=banned,
        num_banned=column([len(row.banned) for row in rows], np.int32, 5),
        is_used=column(True, bool, False),
    )


def seed_words(seed: int) -> tuple[int, int]:
    return (seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF


def shaping_inputs(rows: list[Row], num_rows: int, vocab_size: int) -> ShapingInputs:
    inputs = ShapingInputs(
        repetition=np.ones(num_rows, np.float32),
        presence=np.zeros(num_rows, np.float32),
        frequency=np.zeros(num_rows, np.float32),
        prompt_seen=np.zeros((num_rows, vocab_size), bool),
        output_counts=np.zeros((num_rows, vocab_size), np.int32),
        bias=np.zeros((num_rows, vocab_size), np.float32),
        word_ends=np.full((num_rows, 256), vocab_size, np.int32),
        allowed_bits=np.full((num_rows, num_words(vocab_size)), 2**32 - 1, np.uint32),
    )
    for index, row in enumerate(rows):
        inputs.repetition[index] = row.repetition
        inputs.presence[index] = row.presence
        inputs.frequency[index] = row.frequency
        inputs.prompt_seen[index, list(row.prompt)] = True
        np.add.at(inputs.output_counts[index], list(row.output), 1)
        if row.allowed:
            inputs.bias[index] = -np.inf
            inputs.bias[index, list(row.allowed)] = 0
        for token_id, bias in row.bias:
            inputs.bias[index, token_id] += bias
        inputs.word_ends[index, : len(row.word_ends)] = row.word_ends
        if row.grammar:
            allowed = np.zeros(32 * num_words(vocab_size), np.uint8)
            allowed[list(row.grammar)] = 1
            inputs.allowed_bits[index] = np.packbits(allowed, bitorder="little").view("<u4")
    return jax.tree.map(jnp.asarray, inputs)
