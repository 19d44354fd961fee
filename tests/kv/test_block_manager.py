"""Growing, forking, copying and giving back blocks."""

import numpy as np
import pytest

from jserve.kv import BlockManager, GroupSpec
from tests.support.kv_device import KvDevice, prefix_ids

BLOCK_SIZE = 4


def make(num_blocks=32, **options) -> BlockManager:
    options = {"groups": [GroupSpec()], "num_slots": 8, "max_blocks_per_seq": 16} | options
    return BlockManager(num_blocks=[num_blocks] * len(options["groups"]), block_size=BLOCK_SIZE, **options)


def start(kv: BlockManager, slot: int, num_tokens: int, first: int = 0) -> np.ndarray:
    tokens = first + np.arange(num_tokens, dtype=np.int32)
    kv.admit(slot, tokens)
    assert kv.grow(slot, num_tokens)
    kv.commit(slot, tokens, num_tokens)
    return tokens


def test_a_table_row_names_a_block_for_each_started_block_of_tokens():
    kv = make()
    start(kv, 0, 9)
    assert np.count_nonzero(kv.tables[0][0]) == 3 and (kv.tables[0][0, :3] > 0).all()
    assert kv.num_new_blocks(0, 12) == 0 and kv.grow(0, 12) and kv.num_used_blocks == 3
    assert kv.num_new_blocks(0, 17) == 2 and kv.grow(0, 17) and kv.num_used_blocks == 5
    assert kv.grow(0, 3) and kv.num_used_blocks == 5  # never shrinks


def test_growing_beyond_the_pool_takes_nothing():
    kv = make(num_blocks=1 + 8)
    start(kv, 0, 20)
    before = kv.tables[0].copy()
    kv.admit(1, np.zeros(20, np.int32))
    assert not kv.can_grow(1, 16) and not kv.grow(1, 16)
    assert (kv.tables[0] == before).all() and kv.num_free_blocks == 3
    assert kv.grow(1, 12)
    assert kv.check_integrity() == []


def test_what_can_never_fit_is_known_before_it_starts():
    kv = make(num_blocks=1 + 8, max_blocks_per_seq=12)
    assert kv.fits(32) and not kv.fits(33)
    assert not kv.can_admit(np.zeros(40, np.int32))
    assert kv.can_admit(np.zeros(4, np.int32))
    assert not make(num_blocks=64, max_blocks_per_seq=8).fits(33)


def test_admission_counts_cached_blocks_once_and_leaves_the_headroom():
    kv = make(num_blocks=1 + 6)
    tokens = start(kv, 0, 17)  # five blocks; one is left
    other = 50 + np.arange(5, dtype=np.int32)
    assert kv.can_admit(tokens) and not kv.can_admit(tokens, headroom=1)  # shares four, needs one
    assert not kv.can_admit(tokens, use_cache=False) and not kv.can_admit(other)
    kv.free(0)  # four cached, two free
    assert kv.can_admit(tokens, headroom=1) and not kv.can_admit(tokens, headroom=2)
    assert kv.can_admit(other, headroom=4) and not kv.can_admit(other, headroom=5)
    before = kv.num_cached_blocks, kv.num_free_blocks, kv.stats
    assert before == (4, 2, kv.stats)


def test_a_window_group_needs_room_for_a_step_and_its_window_only():
    kv = make(num_blocks=1 + 6, groups=[GroupSpec(window=8)], max_blocks_per_seq=100)
    tokens = np.arange(200, dtype=np.int32)
    assert not kv.fits(200) and kv.fits(200, step_tokens=13) and not kv.fits(200, step_tokens=14)
    assert not kv.can_admit(tokens) and kv.can_admit(tokens, step_tokens=13, headroom=2)
    assert not kv.can_admit(tokens, step_tokens=13, headroom=3)
    kv.admit(0, tokens)
    for first in range(0, 200, 13):
        last = min(first + 13, 200)
        assert kv.grow(0, last)
        kv.commit(0, tokens, last)
        kv.release_behind_window(np.array([0]), np.array([last]))
    assert kv.check_integrity() == []


def test_sharing_is_counted_in_blocks_saved():
    kv = make()
    start(kv, 0, 10)
    assert kv.num_saved_blocks == 0
    for child in range(1, 5):
        kv.fork(0, child, 10)
    assert (kv.num_used_blocks, kv.num_saved_blocks) == (3, 12)
    kv.grow_each(np.arange(5), np.full(5, 11))
    assert (kv.num_used_blocks, kv.num_saved_blocks) == (7, 8)


def test_growing_many_gives_to_the_leading_ones_in_order():
    kv = make(num_blocks=1 + 6)
    for slot in range(4):
        start(kv, slot, 4, first=10 * slot)
    slots = np.array([2, 0, 3, 1])
    assert kv.grow_each(slots, np.array([4, 4, 4, 4])) == 4
    assert kv.num_free_blocks == 2
    assert kv.grow_each(slots, np.array([5, 5, 5, 4])) == 2  # 2 and 0 get theirs; 3 does not
    assert [int(np.count_nonzero(row)) for row in kv.tables[0][:4]] == [2, 1, 2, 1]
    assert kv.grow_each(np.array([1, 3]), np.array([4, 5])) == 1
    assert kv.grow_each(slots[:0], slots[:0]) == 0
    assert kv.check_integrity() == []


def test_growing_many_by_several_blocks_each():
    kv = make()
    for slot in range(3):
        kv.admit(slot, np.zeros(1, np.int32))
    assert kv.grow_each(np.array([1, 0, 2]), np.array([9, 1, 5])) == 3
    assert [int(np.count_nonzero(row)) for row in kv.tables[0][:3]] == [1, 3, 2]
    assert len(set(kv.tables[0][kv.tables[0] > 0].tolist())) == 6


def test_misuse_is_refused():
    kv = make()
    start(kv, 0, 6)
    with pytest.raises(ValueError, match="slot 0 is taken"):
        kv.admit(0, np.zeros(3, np.int32))
    with pytest.raises(ValueError, match="slot 1 is empty"):
        kv.free(1)
    with pytest.raises(ValueError, match="fork at 7 tokens, but slot 0 has 6 computed"):
        kv.fork(0, 1, 7)
    with pytest.raises(ValueError, match="17 blocks, but a table row has 16"):
        kv.grow(0, 65)
    assert kv.check_integrity() == []


@pytest.mark.parametrize(
    "options, message",
    [
        ({"index": "btree"}, "'btree'"),
        ({"groups": []}, "0 groups"),
        ({"num_blocks": 1}, "num_blocks is 1"),
        ({"hash_block": lambda parent, tokens: b""}, "hashes nothing"),
    ],
)
def test_a_manager_that_cannot_work_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_a_fork_costs_no_block_until_somebody_writes_into_the_shared_last_one():
    kv = make()
    start(kv, 0, 10)
    for child in range(1, 8):
        kv.fork(0, child, 10)
    assert kv.num_used_blocks == 3
    slots = np.arange(8)
    assert kv.num_new_blocks(0, 11) == 1
    assert kv.grow_each(slots, np.full(8, 11)) == 8
    assert kv.num_used_blocks == 2 + 8  # the last owner writes in place
    copies = kv.take_copies()
    assert len(copies) == 7 and kv.take_copies() == []
    assert len({source for _, source, _ in copies}) == 1
    assert len(set(kv.tables[0][:8, 2].tolist())) == 8
    assert kv.stats.num_copied_blocks == 7 and kv.check_integrity() == []


def test_a_fork_at_a_block_border_copies_nothing():
    kv = make()
    start(kv, 0, 8)
    kv.fork(0, 1, 8)
    assert kv.grow_each(np.array([0, 1]), np.array([9, 9])) == 2
    assert kv.take_copies() == [] and kv.num_used_blocks == 4


def test_a_fork_that_does_not_fit_leaves_the_later_members_waiting():
    kv = make(num_blocks=1 + 5)
    start(kv, 0, 10)
    for child in range(1, 4):
        kv.fork(0, child, 10)
    slots = np.arange(4)
    assert kv.grow_each(slots, np.full(4, 11)) == 2  # two copies; the third would need one more
    kv.free(3)
    assert kv.grow_each(slots[2:3], np.full(1, 11)) == 1  # the last owner left: in place
    assert len(kv.take_copies()) == 2 and kv.check_integrity() == []


def test_a_child_that_ends_before_its_copy_ran_takes_the_copy_with_it():
    kv = make(num_blocks=1 + 4)
    start(kv, 0, 10)
    kv.fork(0, 1, 10)
    kv.grow(1, 11)
    kv.free(1)
    assert kv.take_copies() == []
    kv.fork(0, 1, 10)
    kv.grow(1, 11)
    kv.fork(0, 2, 10)
    assert len(kv.take_copies()) == 1


@pytest.mark.parametrize("flush", [False, True])
def test_a_due_copy_goes_with_its_block_when_that_is_cached_and_evicted(flush):
    kv = make(num_blocks=1 + 4)
    tokens = np.arange(8, dtype=np.int32)
    start(kv, 0, 6)
    kv.fork(0, 1, 6)  # while a step in flight writes the parent's tokens 6 and 7
    kv.grow(0, 8)
    kv.commit(0, tokens, 8)
    kv.free(0)  # its copied block is full and stays findable, the copy still due
    assert kv.num_cached_blocks == 1 and kv.check_integrity() == []
    if flush:
        kv.flush()
    else:
        kv.admit(2, tokens[:1] + 50)
        assert kv.grow(2, 8)
    assert kv.take_copies() == []


def test_the_child_of_a_child_is_copied_from_where_the_content_is():
    kv = make()
    tokens = start(kv, 0, 10)
    kv.fork(0, 1, 10)
    kv.grow(1, 11)  # its copy is due, not yet run
    kv.commit(1, tokens, 10)
    kv.fork(1, 2, 10)
    kv.grow(2, 11)
    copies = kv.take_copies()
    source = int(kv.tables[0][0, 2])
    assert sorted(copies) == sorted((0, source, int(kv.tables[0][slot, 2])) for slot in (1, 2))


def test_a_forks_blocks_are_freed_with_their_last_owner():
    kv = make()
    start(kv, 0, 10)
    kv.fork(0, 1, 10)
    kv.free(0)
    assert (kv.num_used_blocks, kv.num_cached_blocks) == (3, 0)
    kv.free(1)
    assert (kv.num_used_blocks, kv.num_cached_blocks) == (0, 2)


def test_a_fork_of_a_window_that_is_gone_is_refused():
    kv = make(groups=[GroupSpec(window=6)])
    start(kv, 0, 20)
    kv.release_behind_window(np.array([0]), np.array([20]))
    kv.fork(0, 1, 20)
    with pytest.raises(ValueError, match="gave back"):
        kv.fork(0, 2, 12)
    assert kv.check_integrity() == []


def test_writes_of_a_fork_never_change_what_another_reads():
    device = KvDevice([GroupSpec()], [32], BLOCK_SIZE, num_slots=4, max_blocks_per_seq=8)
    kv = device.manager
    tokens = [1, 2, 3, 4, 5, 6]
    kv.admit(0, np.array(tokens, np.int32))
    kv.grow(0, 6)
    device.write(0, 0, prefix_ids(b"", tokens))
    kv.commit(0, np.array(tokens, np.int32), 6)
    for child in (1, 2, 3):
        kv.fork(0, child, 6)
    kv.grow_each(np.arange(4), np.full(4, 7))
    device.run_copies()
    for slot in range(4):
        device.write(slot, 6, prefix_ids(b"", tokens + [slot])[-1:])
    for slot in range(4):
        [(_, cells)] = device.read(slot, 7)
        assert cells.tolist() == prefix_ids(b"", tokens + [slot]).tolist()


def test_an_unsound_ledger_is_described():
    kv = make()
    start(kv, 0, 10)
    kv.tables[0][0, 5] = 9
    assert any("unused entry" in problem for problem in kv.check_integrity())
    kv.tables[0][0, 5] = 0
    kv.tables[0][1, 0] = kv.tables[0][0, 1] = kv.tables[0][0, 0]
    assert any("owners differ" in problem for problem in kv.check_integrity())


def test_unused_blocks_are_what_may_be_overwritten():
    kv = make(num_blocks=1 + 8)
    start(kv, 0, 10)
    kv.free(0)  # two blocks stay findable
    [unused] = kv.unused_blocks()
    assert len(unused) == 6 == kv.num_free_blocks and 0 not in unused
