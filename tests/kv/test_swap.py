"""Sequences in host memory: what is saved, what is loaded, and when host blocks are free again."""

import numpy as np
import pytest

from jserve.kv import GroupSpec
from tests.support.kv_device import KvDevice, prefix_ids


def make(num_blocks=16, num_host_blocks=16, **options) -> KvDevice:
    return KvDevice([GroupSpec()], [num_blocks], 4, [num_host_blocks], num_slots=6, max_blocks_per_seq=8, **options)


def start(device: KvDevice, slot: int, tokens: list[int]) -> None:
    kv = device.manager
    kv.admit(slot, np.array(tokens, np.int32))
    kv.grow(slot, len(tokens))
    device.run_copies()
    device.write(slot, 0, prefix_ids(b"", tokens))
    kv.commit(slot, np.array(tokens, np.int32), len(tokens))


def reads_back(device: KvDevice, slot: int, tokens: list[int]) -> bool:
    [(_, cells)] = device.read(slot, len(tokens))
    return cells.tolist() == prefix_ids(b"", tokens).tolist()


def test_a_sequence_comes_back_from_host_memory():
    device = make(num_blocks=1 + 4)
    kv, tokens = device.manager, list(range(10))
    start(device, 0, tokens)
    swapped = kv.swap_out([0])
    assert kv.num_used_blocks == 0 and swapped.num_host_blocks == 3
    start(device, 1, [50] * 16)  # takes every block; the saves run before it writes
    assert not kv.swap_in([0], swapped)
    kv.free(1)
    assert kv.swap_in([0], swapped)
    device.run_copies()
    kv.release_swapped(swapped)
    assert reads_back(device, 0, tokens) and kv.check_integrity() == []


def test_blocks_that_the_prefix_cache_still_finds_are_not_loaded():
    device = make()
    kv, tokens = device.manager, list(range(10))
    start(device, 0, tokens)
    swapped = kv.swap_out([0])
    device.run_copies()
    assert kv.swap_in([0], swapped)
    assert len(kv.take_loads()) == 1  # the partial last block


def test_what_came_back_is_findable_again():
    device = make()
    kv, tokens = device.manager, list(range(10))
    start(device, 0, tokens)
    swapped = kv.swap_out([0])
    kv.flush()
    device.run_copies()
    kv.swap_in([3], swapped)
    device.run_copies()
    assert kv.match(np.array(tokens, np.int32)) == 8
    assert reads_back(device, 3, tokens)


def test_a_fork_group_keeps_sharing_across_a_swap():
    device = make(num_blocks=1 + 7, prefix_cache=False)
    kv, tokens = device.manager, list(range(18))
    start(device, 0, tokens)
    for child in (1, 2):
        kv.fork(0, child, 18)
    swapped = kv.swap_out([0, 1, 2])
    assert swapped.num_host_blocks == 5 and kv.num_used_blocks == 0
    device.run_copies()
    assert kv.swap_in([3, 4, 5], swapped)
    assert kv.num_used_blocks == 5
    assert kv.grow_each(np.array([3, 4, 5]), np.full(3, 19)) == 3 and kv.num_used_blocks == 7
    device.run_copies()
    assert all(reads_back(device, slot, tokens) for slot in (3, 4, 5))
    assert kv.check_integrity() == []


def test_a_full_host_keeps_the_sequence_where_it_is():
    device = make(num_host_blocks=1 + 2)
    kv, tokens = device.manager, list(range(10))
    start(device, 0, tokens)
    assert kv.swap_out([0]) is None
    assert kv.num_used_blocks == 3 and reads_back(device, 0, tokens)


def test_without_host_memory_nothing_is_swapped():
    device = KvDevice([GroupSpec()], [16], 4, num_slots=2, max_blocks_per_seq=8)
    start(device, 0, [1, 2, 3])
    assert device.manager.swap_out([0]) is None and device.manager.take_saves() == []


def test_a_sequence_that_has_not_arrived_is_not_swapped_out_again():
    device = make()
    kv = device.manager
    start(device, 0, list(range(10)))
    swapped = kv.swap_out([0])
    kv.swap_in([0], swapped)
    assert kv.swap_out([0]) is None
    device.run_copies()
    assert kv.swap_out([0]) is not None


def test_host_blocks_are_free_once_released_and_not_before():
    device = make(num_host_blocks=1 + 3)
    kv = device.manager
    start(device, 0, list(range(10)))
    start(device, 1, list(range(20, 30)))
    swapped = kv.swap_out([0])
    device.run_copies()
    assert kv.swap_in([0], swapped)
    with pytest.raises(ValueError, match="before their loads were taken"):
        kv.release_swapped(swapped)
    device.run_copies()
    assert kv.swap_out([1]) is None  # a load may still be reading
    kv.release_swapped(swapped)
    with pytest.raises(ValueError, match="released twice"):
        kv.release_swapped(swapped)
    assert kv.swap_out([1]) is not None


def test_an_abort_in_host_memory_takes_its_saves_with_it():
    device = make()
    kv = device.manager
    start(device, 0, list(range(10)))
    kv.release_swapped(kv.swap_out([0]))
    assert kv.take_saves() == [] and kv.check_integrity() == []
    kv.flush()
    assert kv.num_free_blocks == kv.num_total_blocks


def test_a_load_into_the_source_of_a_due_copy_comes_after_the_copy():
    device = make(num_blocks=1 + 3, prefix_cache=False)
    kv, tokens, other = device.manager, list(range(6)), [50, 51]
    start(device, 0, other)
    swapped = kv.swap_out([0])
    device.run_copies()
    start(device, 0, tokens)
    kv.fork(0, 1, 6)
    assert kv.grow(1, 7)
    source = int(kv.tables[0][0, 1])
    kv.free(0)
    assert kv.swap_in([2], swapped) and kv.tables[0][2, 0] == source
    device.run_copies()
    assert reads_back(device, 1, tokens) and reads_back(device, 2, other)


def test_a_copy_of_what_is_still_to_be_loaded_is_loaded_too():
    device = make(prefix_cache=False)
    kv, tokens = device.manager, list(range(6))
    start(device, 0, tokens)
    kv.fork(0, 1, 6)
    swapped = kv.swap_out([0, 1])
    device.run_copies()
    kv.swap_in([2, 3], swapped)
    assert kv.grow_each(np.array([2, 3]), np.array([7, 7])) == 2
    device.run_copies()
    assert reads_back(device, 2, tokens) and reads_back(device, 3, tokens)
    assert kv.check_integrity() == []
