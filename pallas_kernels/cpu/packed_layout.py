"""How matrices that stay packed lie in memory: GGUF's blocks of 32 weights, in the order in which `matmul_packed` reads them."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np

COLUMNS = 16
"""Rows of the matrix side by side: lanes of a vector."""
DEPTH = 32
"""Weights of one scale."""
BLOCK_BYTES = MappingProxyType({"Q4_0": 18, "Q4_1": 20, "Q8_0": 34})
"""Bytes of 32 weights in GGUF's encodings that are read."""
NUM_FACTORS = MappingProxyType({"Q4_0": 1, "Q4_1": 2, "Q8_0": 1})
"""float16 numbers a block begins with: d, or d and m."""


def tiled(blocks: np.ndarray, encoding: str) -> np.ndarray:
    """u8[N / 16, K / 32 * bytes * 16] of GGUF's u8[N, K / 32 * bytes]: for 16 rows and 32 weights their d, their m, then byte after
    byte of what follows, each of all 16 rows."""
    num_rows, row_bytes = blocks.shape
    size, factor_bytes = BLOCK_BYTES[encoding], 2 * NUM_FACTORS[encoding]
    by_step = blocks.reshape(num_rows // COLUMNS, COLUMNS, row_bytes // size, size).swapaxes(1, 2)
    result = np.empty((*by_step.shape[:2], size, COLUMNS), np.uint8)
    factors = by_step[..., :factor_bytes].reshape(*by_step.shape[:3], -1, 2).swapaxes(2, 3)
    result[..., :factor_bytes, :] = factors.reshape(*by_step.shape[:2], factor_bytes, COLUMNS)
    result[..., factor_bytes:, :] = by_step[..., factor_bytes:].swapaxes(2, 3)
    return result.reshape(num_rows // COLUMNS, -1)
