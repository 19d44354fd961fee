"""Ragged paged attention: write this step's keys and values into the block pool, then attend to every sequence's blocks.

The public names are here; `api` says how they are used, `layout` what the pool looks like, `batch` a step's geometry.
"""

from pallas_kernels.paged_attention.api import IMPLEMENTATIONS, choose, paged_attention, prepare
from pallas_kernels.paged_attention.batch import AttentionSpec, RaggedBatch
from pallas_kernels.paged_attention.layout import PoolLayout, layout

__all__ = [
    "IMPLEMENTATIONS",
    "AttentionSpec",
    "PoolLayout",
    "RaggedBatch",
    "choose",
    "layout",
    "paged_attention",
    "prepare",
]
