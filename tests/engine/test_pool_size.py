"""What a start says of its pool."""

from __future__ import annotations

import pytest

from jserve.config import KvSection
from jserve.engine.pool_size import shortfall
from jserve.runner.memory import GroupMemory, MemoryPlan, plan_memory


def memory(num_blocks: int, windows: tuple[int | None, ...] = (None,)) -> MemoryPlan:
    return plan_memory(
        KvSection(num_blocks=num_blocks), platform="cpu", device_bytes=2**30, weight_bytes=0, activation_bytes=0,
        groups=tuple(GroupMemory(1, 1024, window) for window in windows), block_size=4,
    )


@pytest.mark.parametrize("num_blocks, windows, most", [(9, (None,), 32), (17, (None,), None), (9, (8,), None)])
def test_a_pool_that_holds_less_than_the_context_is_said(num_blocks, windows, most):
    line = shortfall(memory(num_blocks, windows), context_length=64)
    assert (line is None) == (most is None)
    assert line is None or f"holds {most} tokens of one sequence and the context is 64" in line
