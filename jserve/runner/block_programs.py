"""The programs that move KV blocks: copies within a pool, to and from host memory, and poison for freed ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jserve.parallel.placement import POOL, Placement
from jserve.runner.host_blocks import HostBlocks
from pallas_kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks
from pallas_kernels.paged_attention import PoolLayout

NUM_COPIES = 64
"""Block pairs that one copy program moves; more take several calls."""

NUM_SWAPPED = 16
"""Blocks that one program moves to or from host memory, and the size of its staging buffer."""

POISON_BYTE = 0x46
"""Of 8-bit pools: 70 as int8, 13 as fp8, and 12,689 as a scale of both."""
POISON = 100.0
"""What freed blocks are filled with: large for a key or a value, and within every dtype."""


class BlockPrograms:
    """Builds and calls them; one of each kind a layer group."""

    def __init__(
        self,
        layouts: tuple[PoolLayout, ...],
        pool_shapes: tuple[tuple[int, ...], ...],
        num_host_blocks: int,
        poisons_freed: bool,
        placement: Placement,
    ):
        self._layouts = layouts
        self._pool_shapes = pool_shapes
        self._num_host_blocks = num_host_blocks
        self._poisons_freed = poisons_freed
        self._placement = placement
        self._compiled: dict = {}

    def jobs(self, pools: tuple[jax.ShapeDtypeStruct, ...]) -> dict[tuple, Callable[[], jax.stages.Lowered]]:
        """program -> function that lowers it."""
        shape_of, lowering = self._placement.shape, self._placement.lowering
        i32 = lambda *size: shape_of(size, jnp.int32)
        jobs: dict = {}
        for group, pool in enumerate(pools):
            copy = functools.partial(_copy_pairs, platform=self._layouts[group].platform)
            jobs["copy", group] = lowering(copy, (pool, i32(2, NUM_COPIES), i32()), POOL, donated=(0,))
        if self._num_host_blocks or self._poisons_freed:
            for group, (pool, staging) in enumerate(zip(pools, self.staging())):
                blocks, platform = i32(NUM_SWAPPED), self._layouts[group].platform
                gather = functools.partial(gather_blocks, platform=platform)
                jobs["gather", group] = lowering(gather, (pool, blocks, i32()), POOL)
                scatter = functools.partial(scatter_blocks, platform=platform)
                jobs["scatter", group] = lowering(scatter, (pool, blocks, staging, i32()), POOL, donated=(0,))
        return jobs

    def use(self, compiled: dict) -> None:
        """Takes the executables of `jobs`."""
        self._compiled = compiled

    def copy(self, pools, copies: list[tuple[int, int, int]]):
        """Donates pools; copies blocks (group, source, destination)."""
        pools = list(pools)
        for group in range(len(pools)):
            for pairs in independent_copies([(source, to) for of_group, source, to in copies if of_group == group]):
                packed = np.zeros((2, NUM_COPIES), np.int32)
                packed[:, : len(pairs)] = np.array(pairs, np.int32).T
                pools[group] = self._compiled["copy", group](pools[group], packed, np.int32(len(pairs)))
        return tuple(pools)

    def save(self, pools, host: HostBlocks, step_id: int, saves: list[tuple[int, int, int]]) -> None:
        """Starts copies of blocks (group, block, host block) to host memory."""
        for group, pool in enumerate(pools):
            pairs = [(block, host_block) for of_group, block, host_block in saves if of_group == group]
            for run in _runs_of(pairs, NUM_SWAPPED):
                blocks, host_blocks = (list(ids) for ids in zip(*run))
                staging = self._compiled["gather", group](pool, _padded(blocks), np.int32(len(run)))
                host.save(step_id, group, host_blocks, staging)

    def load(self, pools, host: HostBlocks, loads: list[tuple[int, int, int]]):
        """Donates pools; copies blocks (group, host block, block) from host memory."""
        pools = list(pools)
        for group in range(len(pools)):
            pairs = [(host_block, block) for of_group, host_block, block in loads if of_group == group]
            for run in _runs_of(pairs, NUM_SWAPPED):
                host_blocks, blocks = (list(ids) for ids in zip(*run))
                staging = host.load(group, host_blocks, NUM_SWAPPED)
                pools[group] = self._compiled["scatter", group](pools[group], _padded(blocks), staging, np.int32(len(run)))
        return tuple(pools)

    def poison(self, pools, poisoned: list[tuple[int, int]]):
        """Donates pools; fills blocks (group, block) with large finite numbers: of NaN, 0 times it would spread through
        what attention masks."""
        pools = list(pools)
        for group, (shape, layout) in enumerate(zip(self.staging(), self._layouts)):
            blocks = [block for of_group, block in poisoned if of_group == group]
            if blocks:
                if layout.dtype.itemsize == 1:  # as values and as scales
                    staging = np.full(shape.shape, POISON_BYTE, np.uint8).view(shape.dtype)
                else:
                    staging = np.full(shape.shape, POISON, layout.dtype).view(shape.dtype)
                for run in _runs_of(blocks, NUM_SWAPPED):
                    count = np.int32(len(run))
                    pools[group] = self._compiled["scatter", group](pools[group], _padded(run), staging, count)
        return tuple(pools)

    def host_blocks(self) -> HostBlocks | None:
        """Host memory to swap to, if there is any."""
        if not self._num_host_blocks:
            return None
        shapes = [staging.shape[1:] for staging in self.staging()]
        return HostBlocks(self._num_host_blocks + 1, shapes, [layout.storage_dtype for layout in self._layouts])

    def staging(self) -> list[jax.ShapeDtypeStruct]:
        """[NUM_SWAPPED, L, K, planes, P, lanes] of each layer group."""
        return [
            self._placement.shape((NUM_SWAPPED, num_layers, *block), layout.storage_dtype, POOL)
            for (num_layers, _, *block), layout in zip(self._pool_shapes, self._layouts)
        ]


def independent_copies(pairs: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """(source, destination) pairs in runs of at most NUM_COPIES that may be done in any order: no destination is a source.

    >>> list(independent_copies([(1, 5), (2, 1), (2, 6)]))  # block 1 was read, freed and handed out again
    [[(1, 5)], [(2, 1), (2, 6)]]
    """
    run: list[tuple[int, int]] = []
    ids: set[int] = set()
    for source, destination in pairs:
        if len(run) == NUM_COPIES or destination in ids:
            yield run
            run, ids = [], set()
        run.append((source, destination))
        ids.update((source, destination))
    if run:
        yield run


def _runs_of(pairs: list[tuple[int, int]], size: int) -> list[list[tuple[int, int]]]:
    return [pairs[at : at + size] for at in range(0, len(pairs), size)]


def _padded(blocks: list[int]) -> np.ndarray:
    """i32[NUM_SWAPPED]; the dead block where there is none."""
    padded = np.zeros(NUM_SWAPPED, np.int32)
    padded[: len(blocks)] = blocks
    return padded


def _copy_pairs(pool, pairs, count, *, platform: str):
    return copy_blocks(pool, pairs[0], pairs[1], count, platform=platform)
