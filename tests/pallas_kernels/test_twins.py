"""The TPU kernels on twins of real models' steps (`cases.CASES`), interpreted, against the float32 reference.

All memory that no sequence owns is NaN, padding tokens too.  One twin by `make test`,
others by `make soak`: 15 s of a core each.
Error bound: 2e-6 in float32 (the order of sums differs).
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention import mosaic_tpu
from pallas_kernels.paged_attention.cases import CASES, build, twin
from tests.support.tpu_interpreter import EAGER, LAYER, LATE, NUM_LAYERS, SMALL_TILES, raise_on_race

QUICK = ("smollm2-135m/one_token",)
OTHERS = (
    "smollm2-135m/decode_edges_and_padding", "smollm2-135m/mixed_padded", "falcon-7b/mixed", "stablelm-3b/mixed",
    "phi3-mini/mixed", "gemma3-12b-local/decode", "gemma3-12b-local/mixed", "llama3-70b-tp8/mixed",
    "gpt-oss-20b-local/decode", "gpt-oss-20b-local/mixed",
)  # fmt: skip
MODES = {"late": LATE, "eager": EAGER}
BOUND = 2e-6


def twins() -> list:
    cases = [case for case in CASES if case.name in QUICK + OTHERS]
    marks = lambda case: [] if case.name in QUICK else pytest.mark.soak
    return [pytest.param(twin(case), id=case.name, marks=marks(case)) for case in cases]


@pytest.mark.parametrize("case", twins())
def test_tpu_kernels(case):
    inputs = build(case, "tpu", num_layers=NUM_LAYERS, poison=True)
    out, pool = zip(*(run_tpu_kernels(inputs, mode) for mode in MODES.values()))
    np.testing.assert_array_equal(*out)
    np.testing.assert_array_equal(*pool)
    finite = lambda x: jnp.nan_to_num(x, nan=0.0)
    known = replace(inputs, q=finite(inputs.q), k=finite(inputs.k), v=finite(inputs.v), pool=finite(inputs.pool))
    expected, expected_pool = map(np.asarray, known.attend("reference", LAYER))
    assert np.isfinite(out[0][inputs.live]).all(), "NaN reached an output"
    np.testing.assert_allclose(out[0][inputs.live], expected[inputs.live], atol=BOUND, rtol=0)
    # A kernel may clear slots that no token has reached: finite ones are the reference's, foreign blocks are untouched.
    owned = finite(pool[0][LAYER][inputs.owned])
    np.testing.assert_array_equal(owned, expected_pool[LAYER][inputs.owned])
    before, foreign = np.asarray(inputs.pool), ~inputs.owned
    foreign[0] = False
    np.testing.assert_array_equal(pool[0][LAYER, foreign], before[LAYER, foreign])
    np.testing.assert_array_equal(np.delete(pool[0], LAYER, 0), np.delete(before, LAYER, 0))


def run_tpu_kernels(inputs, interpret) -> tuple[np.ndarray, np.ndarray]:
    layout, spec, extras = inputs.layout, inputs.case.spec, inputs.extras
    fits = layout.num_kv_heads % SMALL_TILES.heads_per_matmul == 0 and layout.head_dim <= 128
    tiles = SMALL_TILES if fits else replace(SMALL_TILES, heads_per_matmul=1)

    @jax.jit
    def step(q, k, v, pool, batch):
        metadata = mosaic_tpu.prepare(batch, q.shape[0], layout, spec, tiles)
        static = {"layout": layout, "spec": spec, "tiles": tiles, "interpret": interpret}
        return mosaic_tpu.attend(q, k, v, pool, LAYER, metadata, **static, **extras)

    try:
        answer = jax.device_get(step(inputs.q, inputs.k, inputs.v, inputs.pool, inputs.batch))
        if interpret.detect_races:
            raise_on_race()
    except Exception:
        pltpu.reset_tpu_interpret_mode_state()
        raise
    return answer
