"""What is found again, what is not, and which blocks go first."""

import numpy as np
import pytest

from jserve.kv import BlockManager, GroupSpec
from jserve.kv.block_keys import chain_start, encode_fields, hash_block, root_key, sequence_salt
from jserve.kv.groups import combined_hit

BLOCK_SIZE = 4
INDEXES = ("hash", "radix")


def make(num_blocks=64, index="hash", block_size=BLOCK_SIZE, **options) -> BlockManager:
    options = {"groups": [GroupSpec()], "num_slots": 4, "max_blocks_per_seq": 256} | options
    return BlockManager(num_blocks=[num_blocks] * len(options["groups"]), block_size=block_size, index=index, **options)


def tokens_of(*values) -> np.ndarray:
    return np.array(values, np.int32)


def compute(kv: BlockManager, slot: int, tokens: np.ndarray, **options) -> int:
    """Admits and computes all of `tokens`; returns how many came from the cache."""
    num_cached = kv.admit(slot, tokens, **options)
    assert kv.grow(slot, len(tokens))
    kv.commit(slot, tokens, len(tokens))
    assert kv.check_integrity() == []
    return num_cached


def run(kv: BlockManager, tokens: np.ndarray, **options) -> int:
    """A whole request: compute, then free."""
    num_cached = compute(kv, 0, tokens, **options)
    kv.free(0)
    return num_cached


@pytest.mark.parametrize("index", INDEXES)
def test_a_shared_prompt_of_2010_tokens_is_125_blocks_and_leaves_210_to_compute(index):
    kv = make(num_blocks=400, index=index, block_size=16)
    shared, own = np.arange(2010), np.arange(200)
    assert compute(kv, 0, np.concatenate([shared, 5000 + own]).astype(np.int32)) == 0
    second = np.concatenate([shared, 9000 + own]).astype(np.int32)
    assert kv.match(second) == 2000
    num_cached = compute(kv, 1, second)
    assert num_cached == 125 * 16 and len(second) - num_cached == 210
    assert (kv.tables[0][0, :125] == kv.tables[0][1, :125]).all()
    assert kv.num_used_blocks == 139 + 14


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize(
    "length, hit", [(1, 0), (BLOCK_SIZE - 1, 0), (BLOCK_SIZE, 0), (BLOCK_SIZE + 1, 4), (2 * BLOCK_SIZE, 4), (16, 12)]
)
def test_a_cached_prompt_still_computes_its_last_token(index, length, hit):
    kv = make(index=index)
    tokens = np.arange(length, dtype=np.int32)
    assert [run(kv, tokens) for _ in range(3)] == [0, hit, hit]
    extended = np.append(tokens, 99).astype(np.int32)
    assert run(kv, extended) == length // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("options", [{}, {"index": "radix"}, {"hash_block": lambda parent, tokens: b"same"}])
def test_prompts_that_cancel_out_in_an_algebraic_hash_do_not_hit(options):
    kv = make(**options)
    first = tokens_of(10, 20, 30, 40, 50)
    second = first + tokens_of(31, -1, 0, 0, 0)
    assert run(kv, first) == 0
    assert run(kv, second) == 0
    assert run(kv, first) == 4


def test_under_a_constant_hash_only_the_true_prefix_is_found():
    kv = make(hash_block=lambda parent, tokens: b"same")
    assert run(kv, tokens_of(*range(12))) == 0
    assert kv.match(tokens_of(*range(12))) == 4  # the second block collides with the first and is not kept
    assert kv.match(tokens_of(4, 5, 6, 7, 8)) == 0  # the same tokens as a block, but of another prefix
    assert kv.match(tokens_of(0, 1, 2, 3, 0, 1, 2, 3, 0)) == 4


def test_another_salt_or_model_sees_nothing():
    kv = make()
    tokens = np.arange(9, dtype=np.int32)
    assert run(kv, tokens, salt=b"a") == 0
    assert run(kv, tokens, salt=b"b") == 0
    assert run(kv, tokens, salt=b"a") == 8
    models = {root_key(model=digest, dtype=dtype) for digest in (b"1", b"2") for dtype in ("float32", "int8")}
    assert len({chain_start(root, b"", 4) for root in models}) == 4


def test_keys_are_the_same_in_every_process():
    start = chain_start(root_key(model=b"digest", dtype="float32"), b"", 4)
    key = hash_block(start, tokens_of(1, 2, 3, 4).tobytes())
    assert key.hex() == "566b0ea62deeac453880b48e81b403f22a80516e9e1e5179574d4d1acf625459"


def test_no_two_field_lists_encode_alike():
    lists = [
        {"a": b"x", "b": b""}, {"a": b"", "b": b"x"}, {"a": b"x"}, {"a": "x"}, {"ab": "x"}, {"a": None}, {"a": b""},
        {"a": ""}, {"a": 1}, {"a": "1"}, {"a": b"1"}, {"a": b"xb"}, {"b": b"x", "a": b""}, {},
    ]  # fmt: skip
    assert len({encode_fields("k", **fields) for fields in lists}) == len(lists)
    assert sequence_salt(tenant="x") != sequence_salt(cache_salt="x") != root_key(tenant="x")
    with pytest.raises(TypeError, match="lora"):
        encode_fields("k", lora=1.5)


def test_bypassing_the_cache_reads_nothing_but_is_found_by_others():
    kv = make()
    tokens = np.arange(9, dtype=np.int32)
    assert run(kv, tokens, use_cache=False) == 0
    assert run(kv, tokens, use_cache=False) == 0
    assert kv.stats.num_queried_tokens == 0
    assert run(kv, tokens) == 8
    assert (kv.stats.num_queried_tokens, kv.stats.num_hit_tokens) == (9, 8)


def test_without_a_prefix_cache_freed_blocks_are_simply_free():
    kv = make(prefix_cache=False)
    tokens = np.arange(9, dtype=np.int32)
    assert [run(kv, tokens), run(kv, tokens), kv.match(tokens)] == [0, 0, 0]
    assert (kv.num_cached_blocks, kv.num_free_blocks) == (0, kv.num_total_blocks)


def test_blocks_are_found_from_commit_on_and_only_as_far_as_computed():
    kv = make()
    tokens = np.arange(13, dtype=np.int32)
    kv.admit(0, tokens)
    kv.grow(0, 13)
    assert kv.match(tokens) == 0
    for num_computed, found in [(3, 0), (4, 4), (7, 4), (11, 8), (13, 12)]:
        kv.commit(0, tokens, num_computed)
        assert kv.match(tokens) == found
    assert kv.check_integrity() == []


def test_freed_while_its_prompt_is_half_computed_only_the_computed_half_is_found():
    kv = make()
    tokens = np.arange(17, dtype=np.int32)
    kv.admit(0, tokens)
    kv.grow(0, 17)
    kv.commit(0, tokens, 9)
    kv.free(0)
    assert kv.match(tokens) == 8
    assert (kv.num_cached_blocks, kv.num_used_blocks) == (2, 0)


@pytest.mark.parametrize("index", INDEXES)
def test_freed_blocks_stay_findable_until_reused_the_tail_of_a_chain_first(index):
    kv = make(num_blocks=1 + 5, index=index)
    tokens = np.arange(17, dtype=np.int32)
    run(kv, tokens)  # four full blocks and one with a single token
    assert (kv.num_cached_blocks, kv.num_free_blocks) == (4, 1)
    other = 100 + np.arange(4, dtype=np.int32)
    for num_tokens, found in [(4, 16), (8, 12), (12, 8), (16, 4), (20, 0)]:
        kv.admit(1, other)
        assert kv.grow(1, num_tokens)
        assert kv.match(tokens) == found
        kv.free(1)
        assert kv.check_integrity() == []
    assert kv.stats.num_evicted_blocks == 4


def test_the_least_recently_used_prefix_goes_first():
    kv = make(num_blocks=1 + 7)
    first, second, third = (start + np.arange(9, dtype=np.int32) for start in (0, 100, 200))
    for tokens in (first, second, third, first):  # two full blocks each; the last one uses the first again
        run(kv, tokens)
    kv.admit(1, tokens_of(1))
    kv.grow(1, 12)
    assert [kv.match(tokens) for tokens in (first, second, third)] == [8, 0, 8]


def test_a_prefix_in_use_is_never_evicted():
    kv = make(num_blocks=1 + 4)
    tokens = np.arange(9, dtype=np.int32)
    compute(kv, 0, tokens)
    kv.admit(1, tokens_of(50))
    assert kv.grow(1, 4)
    assert not kv.grow(1, 8)
    assert kv.match(tokens) == 8


@pytest.mark.parametrize("index", INDEXES)
def test_of_two_that_compute_the_same_prefix_the_first_blocks_are_the_ones_found(index):
    kv = make(index=index)
    tokens = np.arange(9, dtype=np.int32)
    for slot in (0, 1):  # both start before either is known
        assert kv.admit(slot, tokens) == 0
        kv.grow(slot, 9)
    for slot in (0, 1):
        kv.commit(slot, tokens, 9)
    assert kv.stats.num_duplicate_blocks == 2
    assert not np.intersect1d(kv.tables[0][0, :3], kv.tables[0][1, :3]).size
    assert compute(kv, 2, tokens) == 8
    assert (kv.tables[0][2, :2] == kv.tables[0][0, :2]).all()


def test_a_duplicate_takes_over_when_the_first_blocks_are_gone():
    kv = make(num_blocks=1 + 7)
    tokens = np.arange(9, dtype=np.int32)
    for slot in (0, 1):
        kv.admit(slot, tokens)
        kv.grow(slot, 9)
        kv.commit(slot, tokens, 0)
    for slot in (0, 1):
        kv.commit(slot, tokens, 9)
    kv.free(0)
    kv.admit(2, tokens_of(50))
    kv.grow(2, 16)  # evicts what slot 0 had registered
    kv.free(2)
    assert kv.match(tokens) == 0
    kv.free(1)
    assert kv.match(tokens) == 8
    assert kv.check_integrity() == []


def test_flush_forgets_what_nobody_owns():
    kv = make()
    shared = np.arange(9, dtype=np.int32)
    compute(kv, 1, shared)
    run(kv, np.append(shared, np.arange(50, 60)).astype(np.int32))
    assert kv.flush() == 2  # blocks of 4 behind the shared 8 tokens
    assert kv.match(np.append(shared, 1).astype(np.int32)) == 8
    kv.free(1)
    assert kv.flush() == 2
    assert kv.match(shared) == 0
    assert kv.num_free_blocks == kv.num_total_blocks


def test_200_distinct_prompts_through_20_blocks():
    kv = make(num_blocks=21)
    for start in range(200):
        assert run(kv, 1000 * start + np.arange(30, dtype=np.int32)) == 0
    assert kv.stats.num_evicted_blocks > 0
    assert kv.num_free_blocks + kv.num_cached_blocks == kv.num_total_blocks


@pytest.mark.parametrize("index", INDEXES)
def test_200_prompts_of_5_families_through_6_blocks(index):
    kv = make(num_blocks=7, index=index)
    random = np.random.default_rng(0)
    families = random.integers(0, 1000, (5, 20)).astype(np.int32)
    num_cached = 0
    for _ in range(200):
        tokens = families[random.integers(5)][: random.integers(1, 21)].copy()
        if len(tokens) > 3 and random.random() < 0.5:
            tokens[-2:] = random.integers(0, 1000, 2)
        num_cached += run(kv, tokens)
        assert kv.num_used_blocks == 0
    assert num_cached > 0


def test_asking_again_finds_what_became_known_since():
    kv = make()
    tokens = np.arange(17, dtype=np.int32)
    kv.admit(0, tokens)
    kv.grow(0, 17)
    found = []
    for num_computed in (0, 4, 12, 17):
        kv.commit(0, tokens, num_computed)
        found.append(kv.match(tokens))
    assert found == [0, 4, 12, 16]
    kv.free(0)
    kv.flush()
    assert kv.match(tokens) == 0


# What a window group holds of five blocks, and what a full group holds -> the combined hit (window 8, blocks of 4).
WINDOW_TABLE = [
    ([1, 1, 0, 1, 1], [1, 1, 1, 1, 1], 5),
    ([1, 1, 0, 1, 1], [1, 1, 1, 1, 0], 2),
    ([1, 1, 0, 1, 1], [1, 0, 1, 1, 1], 1),
    ([0, 0, 0, 1, 1], [1, 1, 1, 1, 1], 5),
    ([0, 0, 0, 0, 1], [1, 1, 1, 1, 1], 0),
    ([0, 1, 1, 0, 1], [1, 1, 1, 1, 1], 3),
    ([1, 1, 1, 1, 1], [0, 1, 1, 1, 1], 0),
    ([1, 0, 0, 0, 0], [1, 1, 1, 1, 1], 1),
]


@pytest.mark.parametrize("window, full, hit", WINDOW_TABLE)
def test_the_combined_hit_is_what_both_groups_allow(window, full, hit):
    groups = (GroupSpec(window=8), GroupSpec())
    assert combined_hit(np.array([window, full], bool), groups, BLOCK_SIZE) == hit
    assert combined_hit(np.array([full, window], bool), groups[::-1], BLOCK_SIZE) == hit


@pytest.mark.parametrize("window, blocks_seen", [(1, 0), (2, 1), (5, 1), (6, 2), (8, 2), (9, 2), (10, 3)])
def test_blocks_that_a_window_sees_from_a_block_border(window, blocks_seen):
    spec = GroupSpec(window=window)
    assert spec.num_blocks_seen(BLOCK_SIZE) == blocks_seen
    assert spec.num_blocks_behind(40, BLOCK_SIZE) == 10 - blocks_seen


@pytest.mark.parametrize("index", INDEXES)
def test_window_groups_give_back_what_is_behind_exactly_once_and_hit_with_what_is_left(index):
    kv = make(index=index, groups=[GroupSpec(window=8), GroupSpec()])
    tokens = np.arange(41, dtype=np.int32)
    compute(kv, 0, tokens)
    free = kv.num_free_blocks + kv.num_cached_blocks
    slots, num_computed = np.array([0]), np.array([41])
    for _ in range(2):
        kv.release_behind_window(slots, num_computed)
        assert kv.num_free_blocks + kv.num_cached_blocks == free + 8  # position 41 sees 34 and on: blocks 8, 9, 10
        assert (kv.tables[0][0, :8] == 0).all() and (kv.tables[0][0, 8:11] > 0).all()
        assert (kv.tables[1][0, :11] > 0).all()
    kv.flush()  # the eight blocks behind the window are gone for good
    assert kv.match(tokens) == 40
    assert kv.match(tokens[:38]) == 0  # its window would need blocks 7 and 8
    assert compute(kv, 1, tokens) == 40
    assert (kv.tables[0][1, :8] == 0).all() and (kv.tables[0][1, 8:10] == kv.tables[0][0, 8:10]).all()
    kv.free(0)
    kv.free(1)
    assert kv.num_used_blocks == 0 and kv.check_integrity() == []


def test_a_long_sequence_of_a_window_group_never_holds_more_than_its_window():
    kv = make(num_blocks=6, groups=[GroupSpec(window=8)], num_slots=1)
    tokens = np.arange(400, dtype=np.int32)
    slots = np.array([0])
    kv.admit(0, tokens[:1])
    for position in range(400):
        assert kv.grow(0, position + 1)
        kv.commit(0, tokens, position + 1)
        kv.release_behind_window(slots, np.array([position + 1]))
        assert kv.num_used_blocks <= 3
    assert kv.check_integrity() == []


def test_a_window_of_zero_is_refused():
    with pytest.raises(ValueError, match="window is 0"):
        GroupSpec(window=0)
