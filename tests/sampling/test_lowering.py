"""The sampler lowers for TPU and GPU too, with no sort over the vocabulary, and its CPU program needs little memory."""

from __future__ import annotations

import re

import jax
import pytest

from jserve.sampling.sampler import VARIANTS, sample
from jserve.sampling.shaping import shape
from tests.sampling.reference import Row
from tests.support.sampler_rows import SAMPLE, sampler_inputs, shaping_inputs

V = 32768


@pytest.mark.parametrize("platform, variant", [("tpu", variant) for variant in VARIANTS] + [("cuda", VARIANTS[-1])])
def test_every_variant_lowers_without_a_sort_over_the_vocabulary(platform, variant):
    program = jax.jit(lambda logits, inputs, shaping: sample(logits, inputs, variant, 32000, shape(logits, shaping)))
    logits = jax.ShapeDtypeStruct((8, V), "float32")
    lowered = program.trace(logits, sampler_inputs([Row()], 8), shaping_inputs([], 8, V)).lower(lowering_platforms=(platform,))
    text = lowered.as_text()
    sorts = re.findall(r'stablehlo\.sort".*?\}\) : \(tensor<([0-9x]+)x[a-z]', text, re.DOTALL)
    searches = re.findall(r"chlo\.top_k.*? : tensor<([0-9x]+)x[a-z]", text)
    assert text.count("stablehlo.sort") == len(sorts) and text.count("chlo.top_k") == len(searches)
    # Only top lists search: the maxima of chunks, then the candidates of 20 chunks of 128 ids.
    assert bool(searches) == variant.logprobs
    assert all(int(shape.split("x")[-1]) <= 20 * 128 for shape in sorts + searches)


def test_temporaries_stay_within_a_few_copies_of_the_logits():
    logits = jax.ShapeDtypeStruct((64, V), "float32")
    program = jax.jit(lambda logits, inputs: sample(logits, inputs, SAMPLE))
    memory = program.lower(logits, sampler_inputs([Row()], 64)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2.5 * 64 * V * 4
