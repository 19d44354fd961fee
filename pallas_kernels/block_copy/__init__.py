"""Copies of whole blocks within a KV pool (copy-on-write) and between a pool and a staging buffer (swapping)."""

from pallas_kernels.block_copy.api import copy_blocks, gather_blocks, scatter_blocks

__all__ = ["copy_blocks", "gather_blocks", "scatter_blocks"]
