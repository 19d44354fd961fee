"""The whole bookkeeping against sequences that are plain lists: whatever happens, each reads back its own tokens."""

import hashlib
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from jserve.kv import GroupSpec
from tests.support.kv_device import KvDevice, prefix_ids

BLOCK_SIZE = 4
NUM_SLOTS = 6
MAX_TOKENS = 48
SALTS = (b"", b"tenant")
FAMILIES = [np.random.default_rng(seed).integers(0, 3, MAX_TOKENS) for seed in range(2)]


@dataclass
class Model:
    """What a sequence should be able to read back."""

    salt: bytes
    tokens: list[int]
    num_written: int
    num_committed: int

    def ids(self) -> np.ndarray:
        return prefix_ids(self.salt, self.tokens)


class KvMachine(RuleBasedStateMachine):
    groups: tuple[GroupSpec, ...]
    num_blocks: tuple[int, ...]
    index = "hash"
    hash_block = None
    prefix_cache = True
    finds_all = True

    def __init__(self):
        super().__init__()
        options = {"hash_block": self.hash_block} if self.hash_block else {}
        self.device = KvDevice(
            self.groups,
            self.num_blocks,
            BLOCK_SIZE,
            num_host_blocks=[9] * len(self.groups),
            num_slots=NUM_SLOTS,
            max_blocks_per_seq=MAX_TOKENS // BLOCK_SIZE,
            index=self.index,
            prefix_cache=self.prefix_cache,
            **options,
        )
        self.kv = self.device.manager
        self.live: dict[int, Model] = {}
        self.swapped: list[tuple[object, list[Model]]] = []
        self.restored: list[object] = []

    # Choices

    def pick(self, choice: int) -> int:
        return sorted(self.live)[choice % len(self.live)]

    def empty_slots(self) -> list[int]:
        return [slot for slot in range(NUM_SLOTS) if slot not in self.live]

    has_room = precondition(lambda self: len(self.live) < NUM_SLOTS)
    has_sequence = precondition(lambda self: self.live)
    choices = st.integers(0, NUM_SLOTS - 1)

    # Actions

    @has_room
    @rule(
        family=st.integers(0, 1),
        num_shared=st.integers(0, 30),
        tail=st.lists(st.integers(0, 2), max_size=8),
        salt=st.sampled_from(SALTS),
        use_cache=st.booleans() | st.just(True),
        headroom=st.integers(0, 3),
    )
    def admit(self, family, num_shared, tail, salt, use_cache, headroom):
        tokens = np.array(FAMILIES[family][:num_shared].tolist() + tail or [1], np.int32)
        slot = self.empty_slots()[0]
        matched = self.kv.match(tokens, salt)
        promised = self.kv.can_admit(tokens, salt=salt, use_cache=use_cache, headroom=headroom)
        num_cached = self.kv.admit(slot, tokens, salt=salt, use_cache=use_cache)
        assert num_cached == (matched if use_cache else 0) <= len(tokens) - 1
        if self.prefix_cache and not self.restored:
            expected = self.expected_hit(tokens, salt)
            assert matched == expected if self.finds_all else matched <= expected
        self.live[slot] = Model(salt, tokens.tolist(), num_cached, num_cached)
        num_available = self.kv.num_available_blocks
        assert promised == (num_available - self.kv.num_new_blocks(slot, len(tokens)) >= headroom)

    @has_sequence
    @rule(choice=choices, count=st.integers(1, 9), token=st.integers(0, 2))
    def write(self, choice, count, token):
        slot = self.pick(choice)
        model = self.live[slot]
        count = min(count, MAX_TOKENS - model.num_written)
        if count <= 0:
            return
        end = model.num_written + count
        model.tokens += [token] * (end - len(model.tokens))
        fits = self.kv.can_grow(slot, end)
        tables = [table.copy() for table in self.kv.tables]
        assert self.kv.grow(slot, end) == fits
        if not fits:
            assert all((before == after).all() for before, after in zip(tables, self.kv.tables))
            return
        self.device.run_copies()
        self.device.write(slot, model.num_written, model.ids()[model.num_written : end])
        model.num_written = end

    @has_sequence
    @rule(token=st.integers(0, 2))
    def step(self, token):
        slots = [slot for slot, model in self.live.items() if model.num_written < MAX_TOKENS]
        ends = [self.live[slot].num_written + 1 for slot in slots]
        num_grown = self.kv.grow_each(np.array(slots, int), np.array(ends, int))
        if num_grown < len(slots):
            assert not self.kv.can_grow(slots[num_grown], ends[num_grown])
        self.device.run_copies()
        for slot in slots[:num_grown]:
            model = self.live[slot]
            if len(model.tokens) == model.num_written:
                model.tokens.append((token + slot) % 3)
            self.device.write(slot, model.num_written, model.ids()[model.num_written : model.num_written + 1])
            model.num_written += 1

    @has_sequence
    @rule(choice=choices, count=st.integers(1, 6))
    def write_rejected_drafts(self, choice, count):
        slot = self.pick(choice)
        model = self.live[slot]
        end = min(model.num_written + count, MAX_TOKENS)
        if self.kv.grow(slot, end):
            self.device.run_copies()
            self.device.write(slot, model.num_written, np.full(end - model.num_written, -slot - 10))

    @has_sequence
    @rule(choice=choices, behind=st.sampled_from([0, 0, 0, 1, 3]))
    def commit(self, choice, behind):
        slot = self.pick(choice)
        model = self.live[slot]
        model.num_committed = max(model.num_committed, model.num_written - behind)
        self.kv.commit(slot, np.array(model.tokens, np.int32), model.num_committed)

    @has_sequence
    @rule()
    def commit_each(self):
        for model in self.live.values():
            model.num_committed = model.num_written
        slots = np.array(sorted(self.live))
        tokens = {slot: np.array(self.live[slot].tokens, np.int32) for slot in self.live}
        self.kv.commit_each(slots, tokens, np.array([self.live[slot].num_committed for slot in slots]))

    @precondition(lambda self: self.live and len(self.live) < NUM_SLOTS)
    @rule(choice=choices, back=st.sampled_from([0, 0, 0, 1, 2, 5]))
    def fork(self, choice, back):
        parent, child = self.pick(choice), self.empty_slots()[0]
        model = self.live[parent]
        num_tokens = max(model.num_committed - back, 0)
        try:
            self.kv.fork(parent, child, num_tokens)
        except ValueError:
            assert any(spec.window for spec in self.groups)
            return
        self.live[child] = Model(model.salt, model.tokens[:num_tokens], num_tokens, num_tokens)

    @has_sequence
    @rule(choice=choices)
    def release_behind_window(self, choice):
        slots = np.array([self.pick(choice)])
        self.kv.release_behind_window(slots, np.array([self.live[slots[0]].num_written]))

    @has_sequence
    @rule(choice=choices)
    def free(self, choice):
        slot = self.pick(choice)
        self.kv.free(slot)
        del self.live[slot]

    @rule()
    def flush(self):
        cached, free = self.kv.num_cached_blocks, self.kv.num_free_blocks
        assert self.kv.flush() == cached
        assert (self.kv.num_cached_blocks, self.kv.num_free_blocks) == (0, free + cached)

    @has_sequence
    @rule(first=choices, second=choices)
    def swap_out(self, first, second):
        slots = sorted({self.pick(first), self.pick(second)})
        swapped = self.kv.swap_out(slots)
        if swapped is not None:
            self.swapped.append((swapped, [self.live.pop(slot) for slot in slots]))

    @precondition(lambda self: self.swapped)
    @rule(abort=st.sampled_from([False, False, False, True]))
    def swap_in(self, abort):
        swapped, models = self.swapped[0]
        if abort:
            self.kv.release_swapped(self.swapped.pop(0)[0])
            return
        slots = self.empty_slots()[: len(models)]
        if len(slots) == len(models) and self.kv.swap_in(slots, swapped):
            self.live.update(zip(slots, models))
            self.restored.append(self.swapped.pop(0)[0])

    @rule()
    def copies_run(self):
        self.device.run_copies()
        for swapped in self.restored:
            self.kv.release_swapped(swapped)
        self.restored.clear()

    # What must hold

    def expected_hit(self, tokens: np.ndarray, salt: bytes) -> int:
        """By looking at the pools: the longest prefix of which every group still holds what it needs."""
        ids = prefix_ids(salt, tokens)
        held = [
            {tuple(row) for row in cells[pool.findable].tolist()}
            for cells, pool in zip(self.device.cells, self.kv._memory.pools)
        ]

        def has(group, block):
            return tuple(ids[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE].tolist()) in held[group]

        for count in range((len(tokens) - 1) // BLOCK_SIZE, 0, -1):
            if all(
                all(has(group, block) for block in range(count) if not self.behind(spec, block, count))
                for group, spec in enumerate(self.groups)
            ):
                return count * BLOCK_SIZE
        return 0

    def behind(self, spec: GroupSpec, block: int, count: int) -> bool:
        last_position = (block + 1) * BLOCK_SIZE - 1
        return spec.window is not None and last_position <= count * BLOCK_SIZE - spec.window

    @invariant()
    def each_sequence_reads_back_its_own_tokens(self):
        if not self.restored:  # else loads are still due
            for slot, model in self.live.items():
                expected = model.ids()
                for first, cells in self.device.read(slot, model.num_written):
                    np.testing.assert_array_equal(cells, expected[first : model.num_written])

    @invariant()
    def the_ledger_is_sound(self):
        assert self.kv.check_integrity() == []

    def teardown(self):
        for slot in self.live:
            self.kv.free(slot)
        self.device.run_copies()
        for swapped in self.restored + [swapped for swapped, _ in self.swapped]:
            self.kv.release_swapped(swapped)
        self.kv.flush()
        assert self.kv.num_free_blocks == self.kv.num_total_blocks
        assert self.kv.check_integrity() == []
        assert self.kv._index.num_nodes == 0


FULL, WINDOW, NARROW = GroupSpec(), GroupSpec(window=8), GroupSpec(window=3)
WEAK_HASHES = {
    "constant": lambda parent, tokens: b"same",
    "two bits": lambda parent, tokens: bytes([hashlib.sha256(parent + tokens).digest()[0] & 3]),
}
MACHINES = {
    "one group": {"groups": (FULL,), "num_blocks": (24,)},
    "one group, radix": {"groups": (FULL,), "num_blocks": (24,), "index": "radix"},
    "a roomy pool": {"groups": (FULL,), "num_blocks": (90,)},
    "a pool of one sequence": {"groups": (FULL,), "num_blocks": (MAX_TOKENS // BLOCK_SIZE + 1,)},
    "constant hash": {"groups": (FULL,), "num_blocks": (24,), "hash_block": "constant"},
    "two bits of hash": {"groups": (FULL, WINDOW), "num_blocks": (24, 24), "hash_block": "two bits"},
    "alternating windows": {"groups": (FULL, WINDOW), "num_blocks": (30, 22)},
    "alternating windows, radix": {"groups": (WINDOW, FULL), "num_blocks": (22, 30), "index": "radix"},
    "all windows": {"groups": (WINDOW,), "num_blocks": (20,)},
    "a window below a block": {"groups": (NARROW, FULL), "num_blocks": (20, 30), "index": "radix"},
    "no prefix cache": {"groups": (FULL, WINDOW), "num_blocks": (24, 24), "prefix_cache": False},
}


def run_machine(name: str, num_examples: int, num_steps: int) -> None:
    options = dict(MACHINES[name])
    weak = options.pop("hash_block", None)
    options["hash_block"] = staticmethod(WEAK_HASHES[weak]) if weak else None
    options["finds_all"] = weak is None
    run_state_machine_as_test(
        type("Machine", (KvMachine,), options),
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=num_steps,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("name", MACHINES)
def test_each_sequence_reads_back_its_own_tokens_whatever_happens(name):
    run_machine(name, num_examples=60, num_steps=60)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MACHINES)
def test_each_sequence_reads_back_its_own_tokens_for_long(name):
    run_machine(name, num_examples=2000, num_steps=100)
