"""Keys and values in fewer bits on SmolLM2: how far prompt log-probabilities may be from another program's float32."""

from __future__ import annotations

import numpy as np
import pytest

from jserve.config import Config
from tests.support.smollm2 import smollm2_gguf
from tools.quality import measure, scored_records

pytestmark = [pytest.mark.xdist_group("smollm2"), pytest.mark.slow]


@pytest.mark.parametrize(("dtype", "mean", "most"), [("bf16", 0.02, 0.2), ("int8", 0.04, 0.6)])
def test_prompt_logprobs_stay_near_float32(dtype, mean, most):
    smollm2_gguf()
    config = Config().replace("kv", dtype=dtype, memory_bytes=128 * 2**20)
    quality = measure(config, scored_records()[:6], max_tokens=1)
    sizes = np.abs(quality.differences)
    assert len(sizes) > 40 and 0 < sizes.mean() < mean and sizes.max() < most, str(quality)
