"""Blocks in files: found again, within the budget, and no file that is not exactly the block does any harm."""

import errno
import os
import time

import numpy as np
import pytest

from jserve.kv.disk_tier import Transfer
from jserve.tiers import block_file
from jserve.tiers.disk_store import DiskStore

LABEL = b"what the block depends on"
SIZE = 4096


def name(at: int) -> str:
    return f"{at:064x}-0"


class Memory:
    def __init__(self, num_blocks: int = 20):
        self.blocks = np.random.default_rng(0).integers(0, 256, (num_blocks, SIZE), np.uint8)

    def __call__(self, group: int, host_block: int) -> np.ndarray:
        return self.blocks[host_block]


@pytest.fixture
def memory():
    return Memory()


def open_store(folder, memory, budget=2**20) -> DiskStore:
    store = DiskStore(folder, budget)
    store.attach(memory)
    return store


def wait(store: DiskStore, count: int) -> list[tuple[Transfer, bool]]:
    done = []
    for _ in range(1000):
        done += store.take_done()
        if len(done) >= count:
            return done
        time.sleep(0.01)
    raise AssertionError(f"{len(done)} of {count} transfers are done")


def put(store: DiskStore, *places: int) -> list[bool]:
    for at in places:
        store.put(name(at), LABEL, Transfer(0, at))
    return [copied for _, copied in wait(store, len(places))]


def get(store: DiskStore, at: int, label: bytes = LABEL) -> bool:
    store.get(name(at), label, Transfer(0, 19))
    [(transfer, copied)] = wait(store, 1)
    assert transfer == Transfer(0, 19)
    return copied


def test_a_block_is_found_again_after_a_restart(tmp_path, memory):
    store = open_store(tmp_path / "deep" / "folder", memory)
    assert put(store, 1, 2) == [True, True]
    store.close()
    later = open_store(tmp_path / "deep" / "folder", memory)
    assert later.holds(name(1)) and not later.holds(name(3)) and later.num_blocks == 2
    assert get(later, 1) and (memory.blocks[19] == memory.blocks[1]).all()
    assert later.check() == []


def test_a_block_with_another_label_is_not_read(tmp_path, memory):
    store = open_store(tmp_path, memory)
    put(store, 1)
    assert not get(store, 1, b"what another block depends on") and not store.holds(name(1))


@pytest.mark.parametrize("damage", ["a bit of the data", "a bit of the label", "cut short", "empty", "longer", "gone"])
def test_a_damaged_file_is_a_miss_and_is_removed(tmp_path, memory, damage):
    store = open_store(tmp_path, memory)
    put(store, 1)
    [file] = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    if damage == "a bit of the data":
        content[1000] ^= 1
    elif damage == "a bit of the label":
        content[25] ^= 1
    elif damage == "longer":
        content += b"."
    else:
        content = content[: {"cut short": 3000}.get(damage, 0)]
    file.write_bytes(content)
    if damage == "gone":
        file.unlink()
    store.close()
    later = open_store(tmp_path, memory)
    assert not later.holds(name(1)) or not get(later, 1)
    assert not file.exists() and not later.holds(name(1)) and later.check() == []


def test_foreign_files_are_left_alone_and_unfinished_ones_removed(tmp_path, memory):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / f"{name(1)}.kv.partial").write_bytes(b"half")
    store = open_store(tmp_path, memory, budget=0)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"] and store.num_blocks == 0


def test_what_bears_the_name_of_a_block_and_is_no_file_keeps_nobody_from_the_others(tmp_path, memory, caplog):
    store = open_store(tmp_path, memory)
    put(store, 3)
    store.close()
    (tmp_path / f"{name(1)}.kv").mkdir()
    (tmp_path / f"{name(2)}.kv").symlink_to("nothing")
    later = open_store(tmp_path, memory)
    assert [at for at in range(5) if later.holds(name(at))] == [3] and not caplog.records
    put(later, 4)
    assert get(later, 3) and get(later, 4)
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"{name(at)}.kv" for at in range(1, 5)]


def test_the_least_recently_used_go_first_also_after_a_restart(tmp_path, memory):
    size = block_file.size_of(LABEL, SIZE)
    store = open_store(tmp_path, memory, budget=3 * size)
    for at in (1, 2, 3):
        put(store, at)
        os.utime(tmp_path / f"{name(at)}.kv", (at, at))
    assert get(store, 1)
    store.close()
    later = open_store(tmp_path, memory, budget=3 * size)
    put(later, 4)
    assert [at for at in range(6) if later.holds(name(at))] == [1, 3, 4]
    assert later.num_bytes == sum(file.stat().st_size for file in tmp_path.iterdir()) == 3 * size
    assert later.check() == []


def test_a_smaller_budget_is_kept_from_the_start(tmp_path, memory):
    store = open_store(tmp_path, memory)
    put(store, 1, 2, 3)
    store.close()
    later = open_store(tmp_path, memory, budget=2 * block_file.size_of(LABEL, SIZE))
    assert later.num_blocks == len(list(tmp_path.iterdir())) == 2


def test_a_block_larger_than_the_budget_is_not_written(tmp_path, memory):
    store = open_store(tmp_path, memory, budget=100)
    assert put(store, 1) == [False] and list(tmp_path.iterdir()) == []


def test_a_flush_forgets_also_what_is_being_written(tmp_path, memory):
    store = open_store(tmp_path, memory)
    put(store, 1)
    started = []

    def slow(group, host_block):
        started.append(host_block)
        time.sleep(0.2)
        return memory(group, host_block)

    store.attach(slow)
    store.put(name(2), LABEL, Transfer(0, 2))
    while not started:
        time.sleep(0.01)
    store.flush()
    assert wait(store, 1) == [(Transfer(0, 2), False)]
    store.close()
    assert store.num_blocks == 0 and list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_once_and_costs_nothing_else(tmp_path, memory, monkeypatch, caplog):
    store = open_store(tmp_path, memory)
    put(store, 1)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(block_file, "write", full)
    assert put(store, 2, 3) == [False, False]
    store._write_after = 0.0
    assert put(store, 4) == [False]
    assert len(caplog.records) == 1 and "No space left" in caplog.records[0].message
    assert get(store, 1) and store.check() == []


def test_what_is_to_be_written_is_written_before_the_end(tmp_path, memory):
    store = open_store(tmp_path, memory)
    for at in range(15):
        store.put(name(at), LABEL, Transfer(0, at))
    store.close()
    assert len(list(tmp_path.iterdir())) == 15
