"""The whole bookkeeping against sequences that are plain lists: whatever happens, each reads back its own tokens."""

import hashlib
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

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
    host_tier = has_disk = False
    num_host_blocks = 9

    def __init__(self):
        super().__init__()
        options = {"hash_block": self.hash_block} if self.hash_block else {}
        self.device = KvDevice(
            self.groups,
            self.num_blocks,
            BLOCK_SIZE,
            num_host_blocks=[self.num_host_blocks] * len(self.groups),
            host_tier=self.host_tier,
            has_disk=self.has_disk,
            num_slots=NUM_SLOTS,
            max_blocks_per_seq=MAX_TOKENS // BLOCK_SIZE,
            index=self.index,
            prefix_cache=self.prefix_cache,
            **options,
        )
        self.kv = self.device.manager
        self.live: dict[int, Model] = {}
        self.swapped: list[tuple[object, list[Model]]] = []
        self.restored: list[object] = []  # swapped in; their host blocks are released after the loads
        self.planned: dict[int, int] = {}  # slot -> tokens that the next step has written
        self.fetches: list[object] = []
        self.transfers_due = False

    # Choices

    def pick(self, choice: int) -> int:
        return sorted(self.live)[choice % len(self.live)]

    def empty_slots(self) -> list[int]:
        return [slot for slot in range(NUM_SLOTS) if slot not in self.live]

    def leave(self, slot: int) -> Model:
        self.planned.pop(slot, None)
        return self.live.pop(slot)

    @initialize(count=st.integers(1, 4))
    def start(self, count):
        """Sequences to begin with, some computed."""
        for place in range(count):
            self.admit(0, 7 * place + 3, [place % 2], b"", True, 0)
        self.plan_each(0)
        for slot in range(0, count, 2):
            self.plan(slot, 9, 1)
        self.step()
        self.commit_each()

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
        options = {"salt": salt, "use_cache": use_cache, "headroom": headroom}
        promised = self.kv.can_admit(tokens, **options)
        promised_step = self.kv.can_admit(tokens, **options, step_tokens=6)
        num_cached = self.kv.admit(slot, tokens, salt=salt, use_cache=use_cache)
        assert num_cached == (matched if use_cache else 0) <= len(tokens) - 1
        if self.prefix_cache and not self.transfers_due:
            expected = self.expected_hit(tokens, salt)
            assert matched == expected if self.finds_all else matched <= expected
        self.live[slot] = Model(salt, tokens.tolist(), num_cached, num_cached)
        num_available = self.kv.num_available_blocks
        assert promised == (num_available - self.kv.num_new_blocks(slot, len(tokens)) >= headroom)
        end = min(num_cached + 6, len(tokens))
        assert promised_step == (num_available - self.kv.num_new_blocks(slot, end) >= headroom)

    @has_sequence
    @rule(choice=choices, count=st.integers(1, 9), token=st.integers(0, 2))
    def plan(self, choice, count, token):
        """Room for the next tokens of one sequence, to be written in the next step."""
        slot = self.pick(choice)
        model = self.live[slot]
        end = min(model.num_written + count, MAX_TOKENS)
        model.tokens += [token] * (end - len(model.tokens))
        fits = self.kv.can_grow(slot, end)
        tables = [table.copy() for table in self.kv.tables]
        assert self.kv.grow(slot, end) == fits
        if fits:
            self.planned[slot] = end
            self.transfers_due = True
        else:
            assert all((before == after).all() for before, after in zip(tables, self.kv.tables))

    @has_sequence
    @rule(token=st.integers(0, 2))
    def plan_each(self, token):
        slots = [slot for slot, model in self.live.items() if model.num_written < MAX_TOKENS]
        ends = [self.live[slot].num_written + 1 for slot in slots]
        num_grown = self.kv.grow_each(np.array(slots, int), np.array(ends, int))
        if num_grown < len(slots):
            assert not self.kv.can_grow(slots[num_grown], ends[num_grown])
        for slot, end in zip(slots[:num_grown], ends):
            model = self.live[slot]
            model.tokens += [(token + slot) % 3] * (end - len(model.tokens))
            self.planned[slot] = max(end, self.planned.get(slot, 0))
        self.transfers_due = True

    @rule()
    def step(self):
        """The copies that are due, then the planned writes."""
        self.device.run_copies()
        for slot, end in self.planned.items():
            model = self.live[slot]
            self.device.write(slot, model.num_written, model.ids()[model.num_written : end])
            model.num_written = end
        self.planned.clear()
        for swapped in self.restored:
            self.kv.release_swapped(swapped)
        self.restored.clear()
        self.transfers_due = False

    @has_sequence
    @rule(choice=choices, count=st.integers(1, 6))
    def step_with_rejected_drafts(self, choice, count):
        slot = self.pick(choice)
        self.step()
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
        self.leave(slot)

    @has_sequence
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
            self.swapped.append((swapped, [self.leave(slot) for slot in slots]))

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
            self.transfers_due = True

    # Tiers

    @precondition(lambda self: self.host_tier)
    @rule(family=st.integers(0, 1), num_shared=st.integers(0, 30), salt=st.sampled_from(SALTS))
    def begin_fetch(self, family, num_shared, salt):
        tokens = np.array(FAMILIES[family][: num_shared + 1], np.int32)
        num_known = self.kv.match(tokens, salt)
        fetch = self.kv.tiers.begin_fetch(tokens, salt)
        assert self.kv.match(tokens, salt) == num_known
        if fetch is not None:
            self.fetches.append(fetch)

    @precondition(lambda self: self.fetches)
    @rule(place=st.integers(0, 9), most=st.integers(0, 6))
    def advance_fetch(self, place, most):
        fetch = self.fetches[place % len(self.fetches)]
        num_available, num_used = self.kv.num_available_blocks, self.kv.num_used_blocks
        if self.kv.tiers.advance_fetch(fetch, most):
            self.fetches.remove(fetch)
            self.kv.tiers.end_fetch(fetch)
        assert (self.kv.num_available_blocks, self.kv.num_used_blocks) == (num_available, num_used)
        self.transfers_due = True

    @precondition(lambda self: self.host_tier and len(self.live) < NUM_SLOTS)
    @rule(family=st.integers(0, 1), num_shared=st.integers(4, 40), most=st.integers(1, 3))
    def fetch_and_admit(self, family, num_shared, most):
        """As a request does: nothing else happens but transfers, until all that can be found is on the device."""
        tokens = np.array(FAMILIES[family][:num_shared].tolist() + [1], np.int32)
        fetch = self.kv.tiers.begin_fetch(tokens)
        if fetch is not None:
            for _ in range(40):
                if self.kv.tiers.advance_fetch(fetch, most):
                    break
                if self.has_disk and self.device.store.under_way:
                    self.device.store.complete()
                self.step()
            else:
                raise AssertionError("a fetch that does not end")
            self.kv.tiers.end_fetch(fetch)
            self.transfers_due = True
        self.admit(family, num_shared, [1], b"", True, 0)

    @precondition(lambda self: self.fetches)
    @rule(place=st.integers(0, 9))
    def give_up_fetch(self, place):
        self.kv.tiers.end_fetch(self.fetches.pop(place % len(self.fetches)))

    @precondition(lambda self: self.has_disk and self.device.store.under_way)
    @rule(place=st.integers(0, 9), fails=st.sampled_from([False, False, False, True]))
    def disk_completes(self, place, fails):
        self.device.store.complete(place, fails)

    @precondition(lambda self: self.has_disk and self.device.store.blocks)
    @rule(place=st.integers(0, 9))
    def disk_drops(self, place):
        names = sorted(self.device.store.blocks)
        del self.device.store.blocks[names[place % len(names)]]

    def can(self, action: str) -> bool:
        if action in ("begin_fetch", "fetch_and_admit"):
            return self.host_tier and (action == "begin_fetch" or len(self.live) < NUM_SLOTS)
        if action in ("advance_fetch", "give_up_fetch"):
            return bool(self.fetches)
        if action == "disk_completes":
            return self.has_disk and bool(self.device.store.under_way)
        if action == "disk_drops":
            return self.has_disk and bool(self.device.store.blocks)
        if action in ("admit", "fork") and len(self.live) == NUM_SLOTS:
            return False
        return bool(self.swapped) if action == "swap_in" else bool(self.live) or action == "admit"

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
        if not self.transfers_due:
            for slot, model in self.live.items():
                expected = model.ids()
                for first, cells in self.device.read(slot, model.num_written):
                    np.testing.assert_array_equal(cells, expected[first : model.num_written])

    @invariant()
    def host_memory_holds_what_the_index_says(self):
        if not self.host_tier:
            return
        host, index, num_groups = self.kv.tiers._host, self.kv._cache._index, len(self.groups)
        for group, cells in enumerate(self.device.host_cells):
            for host_block in index.findable_blocks(num_groups + group):
                if (group, host_block) not in host._arriving:
                    salt, tokens = index.prefix(index.node_at(num_groups + group, host_block))
                    ids = prefix_ids(salt, np.frombuffer(tokens, np.int32))[-BLOCK_SIZE:]
                    np.testing.assert_array_equal(cells[host_block], ids)

    @invariant()
    def the_ledger_is_sound(self):
        assert self.kv.check_integrity() == []

    def teardown(self):
        for slot in self.live:
            self.kv.free(slot)
        self.device.run_copies()
        for swapped in self.restored + [swapped for swapped, _ in self.swapped]:
            self.kv.release_swapped(swapped)
        for fetch in self.fetches:
            self.kv.tiers.end_fetch(fetch)
        self.device.run_copies()
        self.device.arrive()
        if self.has_disk:
            self.device.store.complete_all()
            self.kv.tiers.poll()
        self.kv.flush()
        assert self.kv.num_free_blocks == self.kv.num_total_blocks
        assert all(pool.num_free == pool.num_usable for pool in self.kv._swap.pools)
        assert self.kv.check_integrity() == []
        assert self.kv._cache._index.num_nodes == 0


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
    "a host tier": {"groups": (FULL,), "num_blocks": (16,), "host_tier": True, "num_host_blocks": 40, "index": "radix"},
    "a small host tier, windows": {"groups": (FULL, WINDOW), "num_blocks": (20, 16), "host_tier": True},
    "a disk tier": {"groups": (FULL,), "num_blocks": (16,), "host_tier": True, "has_disk": True, "index": "radix"},
    "a disk tier, windows": {
        "groups": (FULL, WINDOW), "num_blocks": (18, 14), "host_tier": True, "has_disk": True, "num_host_blocks": 20
    },
    "a disk tier, constant hash": {
        "groups": (FULL,), "num_blocks": (16,), "host_tier": True, "has_disk": True, "index": "radix",
        "hash_block": "constant",
    },
    "no prefix cache": {"groups": (FULL, WINDOW), "num_blocks": (24, 24), "prefix_cache": False},
}


def random_walk(name: str, seed: int, num_steps: int) -> None:
    """The same actions at random: less to shrink, but much deeper states for the time."""
    machine, random = machine_of(name)(), np.random.default_rng(seed)

    def prompt():
        return random.integers(2), random.integers(31), random.integers(0, 3, random.integers(9)).tolist()

    def slot():
        return random.integers(NUM_SLOTS)

    draws = {  # action: (weight, arguments)
        "admit": (3, lambda: (*prompt(), SALTS[random.random() < 0.1], random.random() < 0.9, random.integers(4))),
        "plan": (4, lambda: (slot(), random.integers(1, 10), random.integers(2))),
        "plan_each": (6, lambda: (random.integers(2),)),
        "step": (8, lambda: ()),
        "step_with_rejected_drafts": (1, lambda: (slot(), random.integers(1, 7))),
        "commit": (3, lambda: (slot(), random.choice([0, 0, 1, 3]))),
        "commit_each": (4, lambda: ()),
        "fork": (3, lambda: (slot(), random.choice([0, 0, 1, 2, 5]))),
        "release_behind_window": (3, lambda: (slot(),)),
        "free": (6 if MACHINES[name].get("host_tier") else 2.5, lambda: (slot(),)),
        "flush": (0.2, lambda: ()),
        "swap_out": (0.8, lambda: (slot(), slot())),
        "swap_in": (1, lambda: (random.random() < 0.1,)),
        "fetch_and_admit": (4, lambda: (random.integers(2), random.integers(4, 41), random.integers(1, 4))),
        "begin_fetch": (2, lambda: (random.integers(2), random.integers(31), SALTS[random.random() < 0.1])),
        "advance_fetch": (5, lambda: (random.integers(10), random.integers(7))),
        "give_up_fetch": (0.5, lambda: (random.integers(10),)),
        "disk_completes": (10, lambda: (random.integers(10), random.random() < 0.1)),
        "disk_drops": (0.3, lambda: (random.integers(10),)),
    }
    weights = np.array([weight for weight, _ in draws.values()])
    trace = []
    try:
        for action in random.choice(list(draws), num_steps, p=weights / weights.sum()):
            if not machine.can(action):
                continue
            arguments = draws[action][1]()
            trace.append((str(action), arguments))
            getattr(machine, action)(*arguments)
            machine.the_ledger_is_sound()
            machine.each_sequence_reads_back_its_own_tokens()
            machine.host_memory_holds_what_the_index_says()
        machine.teardown()
    except BaseException:
        print(f"seed {seed}, after {len(trace)} actions; the last ones:", *trace[-40:], sep="\n  ")
        raise


def machine_of(name: str) -> type[KvMachine]:
    options = dict(MACHINES[name])
    weak = options.pop("hash_block", None)
    options["hash_block"] = staticmethod(WEAK_HASHES[weak]) if weak else None
    options["finds_all"] = weak is None or options.get("index") == "radix"
    return type("Machine", (KvMachine,), options)


def explore(name: str, num_examples: int, num_steps: int) -> None:
    run_state_machine_as_test(
        machine_of(name),
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
    explore(name, num_examples=40, num_steps=50)


@pytest.mark.parametrize("name", MACHINES)
def test_each_sequence_reads_back_its_own_tokens_on_a_long_walk(name):
    for seed in range(3):
        random_walk(name, seed, num_steps=1500)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MACHINES)
def test_each_sequence_reads_back_its_own_tokens_for_hours(name):
    explore(name, num_examples=1000, num_steps=100)
    for seed in range(100, 400):
        random_walk(name, seed, num_steps=2000)
