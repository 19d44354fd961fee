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


def test_a_start_prints_blocks_and_bytes_a_token_of_each_layer_group():
    groups = (GroupMemory(2, 2048, None), GroupMemory(6, 6144, 1024, most_blocks=5))
    printed = str(
        plan_memory(
            KvSection(num_blocks=9), platform="cpu", device_bytes=2**30, weight_bytes=0, activation_bytes=0,
            groups=groups, block_size=4,
        )
    )
    assert "2 layers, full attention: 8 blocks, 512 bytes a token" in printed
    assert "6 layers, window of 1,024 tokens: " in printed and " blocks, 1,536 bytes a token" in printed
    assert "bytes a token" not in str(memory(9)), "one group: its bytes are those of the pool's line"
    assert "= 8 blocks of 4 tokens = 32 tokens (256 bytes each)" in str(memory(9))
