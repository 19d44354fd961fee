"""Copies to host memory: nobody waits for one before its step has been collected, unless it is wanted back."""

from __future__ import annotations

import numpy as np
import pytest

from jserve.runner.host_blocks import HostBlocks


class Copying:
    """Stands for a device array on its way to the host: reading it before it `is_there` would be waiting."""

    def __init__(self, values: list[float]):
        self._blocks = np.full((len(values), 2, 3), np.array(values)[:, None, None], np.float32)
        self.is_started = self.is_there = False

    def copy_to_host_async(self) -> None:
        self.is_started = True

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        assert self.is_there, "waited for a copy that is under way"
        return self._blocks


@pytest.fixture
def host() -> HostBlocks:
    return HostBlocks(8, [(2, 3), (2, 3)], [np.dtype(np.float32)] * 2)


def values(host: HostBlocks, group: int, blocks: list[int]) -> list[float]:
    return host.load(group, blocks, 4)[: len(blocks), 0, 0].tolist()


def test_a_save_is_started_at_once_and_waited_for_with_its_step(host):
    early, late = Copying([1, 2]), Copying([3])
    host.save(1, 0, [5, 6], early)
    host.save(2, 0, [7], late)
    assert early.is_started and late.is_started
    early.is_there = True
    host.settle(1)  # of step 2 nothing is read
    assert values(host, 0, [6, 5]) == [2, 1]


def test_who_wants_a_block_back_waits_for_it_and_for_no_later_one(host):
    wanted, late = Copying([1]), Copying([2])
    host.save(1, 0, [5], wanted)
    host.save(2, 1, [5], late)
    wanted.is_there = True
    assert values(host, 0, [5]) == [1]
    late.is_there = True
    assert values(host, 1, [5]) == [2]


def test_the_last_save_into_a_block_is_what_it_holds(host):
    for step, value in enumerate((1, 2), 1):
        copying = Copying([value])
        copying.is_there = True
        host.save(step, 0, [5], copying)
    assert values(host, 0, [5]) == [2]
    assert host.bytes_of(0, 5).view(np.float32).tolist() == [2] * 6
    lost = Copying([3])
    host.save(3, 0, [5], lost)
    host.forget()  # the device is gone
    assert values(host, 0, [5]) == [2]


def test_what_was_loaded_does_not_change_with_the_block(host):
    """A step may still read it when the block is somebody else's."""
    for step, value in ((1, 1), (2, 2)):
        copying = Copying([value])
        copying.is_there = True
        host.save(step, 0, [5], copying)
        if step == 1:
            staging = host.load(0, [5], 4)
    host.settle()
    assert staging[0, 0, 0] == 1
