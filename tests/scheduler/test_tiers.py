"""Host memory and disk below the prefix cache, through the scheduler: who waits for them and what they find."""

import numpy as np
import pytest

from jserve.scheduler import PreemptionSettings
from jserve.scheduler.tier_waits import LOADS_PER_STEP
from tests.support.host_engine import HostEngine, beams, expected_output, group, output, sequence

SHARED = [(7 * i) % 90 for i in range(40)]  # ten blocks of 4


def engine(**options) -> HostEngine:
    return HostEngine(**{"num_blocks": 16, "num_host_blocks": 60, "host_tier": True, "checks_kv": True, **options})


def churn(host: HostEngine, at: int = 0) -> None:
    """Requests that fill the pool with something else."""
    for place in range(2):
        host.run([sequence(f"churn {at} {place}", [100 + 10 * at + 3 * place + i for i in range(44)], 2)])


@pytest.mark.parametrize("overlap", [False, True])
def test_what_the_device_reused_comes_back_from_host_memory(overlap):
    host = engine(overlap=overlap)
    first, again = sequence("first", SHARED + [1], 4), sequence("again", SHARED + [2], 4)
    host.run([first])
    churn(host)
    assert host.blocks.match(np.array(SHARED + [2], np.int32)) == 0
    host.run([again])
    assert again.num_cached == 40 and output(again) == expected_output(SHARED + [2], 4)
    stats = host.blocks.tier_stats
    assert stats.num_host_hit_tokens == 40 and stats.num_host_loaded_blocks == 10
    assert sum(len(plan.loads) for plan in host.plans) == 10


def test_who_bypasses_the_cache_or_has_another_salt_gets_nothing_from_the_tiers():
    host = engine()
    host.run([sequence("first", SHARED + [1], 2)])
    churn(host)
    bypasses, other = sequence("bypasses", SHARED + [2], 2), sequence("other", SHARED + [2], 2)
    bypasses.use_prefix_cache = False
    other.salt = b"another tenant"
    for one in (bypasses, other):
        host.run([one])
        assert one.num_cached == 0
    assert host.blocks.tier_stats.num_host_hit_tokens == 0


def test_a_flush_empties_every_tier():
    host = engine(has_disk=True)
    host.run([sequence("first", SHARED + [1], 2)])
    churn(host)
    assert host.blocks.tier_stats.num_host_cached_blocks > 0 and host.store.blocks
    host.blocks.flush()
    assert host.blocks.tier_stats.num_host_cached_blocks == 0 and not host.store.blocks
    again = sequence("again", SHARED + [1], 2)
    host.run([again])
    assert again.num_cached == 0


def test_a_block_that_came_back_is_not_saved_again():
    host = engine()
    host.run([sequence("first", SHARED + [1], 2)])
    churn(host)
    host.run([sequence("again", SHARED + [1], 2)])
    num_evicted, num_saved = host.blocks.stats.num_evicted_blocks, host.blocks.tier_stats.num_host_saved_blocks
    churn(host, 1)
    num_evicted = host.blocks.stats.num_evicted_blocks - num_evicted
    assert num_evicted - (host.blocks.tier_stats.num_host_saved_blocks - num_saved) == 10


def test_others_run_while_a_long_prefix_comes_back_a_few_blocks_a_step():
    host = engine(num_blocks=100, num_host_blocks=300, budget=16, max_num_seqs=4)
    prompt = [(11 * i) % 97 for i in range(4 * 40)]
    host.run([sequence("first", prompt + [1], 2)])
    host.run([sequence("churn", [(5 * i) % 83 + 100 for i in range(4 * 95)], 2)])
    running, again = sequence("running", [3], 30), sequence("again", prompt + [2], 3)
    host.add(running)
    host.step()
    host.add(again)
    first_step = len(host.plans)
    while again.slot is None:
        before = running.num_output
        host.step()
        assert running.num_output == before + 1
    loads = [len(plan.loads) for plan in host.plans[first_step:]]
    assert again.num_cached == 160 and sum(loads) > 2 * LOADS_PER_STEP and max(loads) == LOADS_PER_STEP
    host.run()
    assert output(again) == expected_output(prompt + [2], 3)


def test_swapping_takes_the_blocks_of_the_tier_never_the_other_way_round():
    host = engine(num_blocks=14, num_host_blocks=12, preemption=PreemptionSettings("swap"))
    host.run([sequence("first", SHARED + [1], 2)])
    churn(host)
    assert host.blocks.tier_stats.num_host_cached_blocks == 11
    work = [sequence(str(at), [200 + at, 7], 30) for at in range(3)]
    host.run(work)
    assert host.scheduler.num_swap_preemptions > 0
    for at, one in enumerate(work):
        assert output(one) == expected_output([200 + at, 7], 30)


def test_samples_and_beams_take_what_the_tiers_have():
    for make in (lambda: group("samples", SHARED + [1], 4, 3), lambda: beams("beams", SHARED + [1], 4, 3)):
        host = engine(has_disk=True, num_blocks=24)
        cold = make()
        host.add_group(cold)
        host.run()
        for at in range(3):
            churn(host, at)
        warm = make()
        host.add_group(warm)
        host.run()
        assert [output(one) for one in warm] == [output(one) for one in cold]
        assert max(one.num_cached or 0 for one in warm) == 40 and (cold[0].num_cached or 0) == 0


def after_restart(**options) -> HostEngine:
    """An engine that has SHARED on its disk and nowhere else."""
    host, later = engine(has_disk=True), engine(has_disk=True, **options)
    host.run([sequence("first", SHARED + [1], 4)])
    churn(host)
    later.store.blocks.update(host.store.blocks)
    return later


def test_a_disk_hit_survives_the_engine():
    later = after_restart(num_host_blocks=24)
    again = sequence("again", SHARED + [2], 4)
    later.run([again])
    assert again.num_cached == 40 and output(again) == expected_output(SHARED + [2], 4)
    assert later.blocks.tier_stats.num_disk_hit_tokens == 40


def test_a_disk_that_fails_costs_a_hit_and_nothing_else():
    host = after_restart()
    host.store.blocks = {name: (b"of another prefix", content) for name, (_, content) in host.store.blocks.items()}
    again = sequence("again", SHARED + [2], 4)
    host.run([again])
    assert again.num_cached == 0 and output(again) == expected_output(SHARED + [2], 4)


def test_a_disk_that_never_answers_is_waited_for_no_longer_than_that():
    now = [0.0]
    host = after_restart()
    host.scheduler.tiers._clock = lambda: now[0]
    host.store.complete_all = lambda: None
    again = sequence("again", SHARED + [2], 4)
    host.add(again)
    for _ in range(20):
        assert host.step() is None
    assert host.scheduler.awaits_tier and host.scheduler.num_waiting == 1
    now[0] = 60.0
    host.run()
    assert output(again) == expected_output(SHARED + [2], 4)
    while host.store.under_way:  # an answer after all: nobody waits for it, and no block is lost
        host.store.complete()
    host.blocks.tiers.poll()
    assert host.blocks.check_integrity() == []


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_arrivals_aborts_preemptions_and_transfers_gives_the_same_tokens(seed):
    """Aborts before, during and after a transfer among them."""
    random = np.random.default_rng(seed)
    host = engine(
        has_disk=bool(seed % 2), num_blocks=int(random.integers(14, 30)), num_host_blocks=int(random.integers(3, 40)),
        overlap=bool(random.integers(2)), preemption=PreemptionSettings(("recompute", "swap")[seed // 2 % 2]),
    )
    families = [[int(token) for token in random.integers(0, 90, 40)] for _ in range(3)]
    if host.store is not None:

        def complete_some():
            while host.store.under_way and random.random() < 0.7:
                host.store.complete(int(random.integers(99)), fails=random.random() < 0.05)

        host.store.complete_all = complete_some
    alive, ended = [], []
    for at in range(60):
        for _ in range(int(random.integers(0, 3))):
            prompt = families[random.integers(3)][: random.integers(0, 40)] + [int(random.integers(90))]
            one = sequence(f"{at}", prompt, int(random.integers(1, 9)))
            one.use_prefix_cache = random.random() < 0.9
            host.add(one)
            alive.append((one, prompt))
        for _ in range(int(random.integers(1, 12))):
            if host.scheduler.has_work or host.in_flight:
                host.step()
        if alive and random.random() < 0.2:
            host.abort(alive.pop(int(random.integers(len(alive))))[0])
        if (running := host.scheduler.running()) and random.random() < 0.2:
            host.scheduler._preempt(running[-1])
        if random.random() < 0.03:
            host.blocks.flush()
        ended += [item for item in alive if item[0].finished]
        alive = [item for item in alive if not item[0].finished]
    host.run()
    for one, prompt in ended + alive:
        assert output(one) == expected_output(prompt, one.num_output) and one.num_output > 0
    assert host.blocks.tier_stats.num_host_hit_tokens > 0
    assert host.scheduler.num_waiting == 0 and not host.scheduler.awaits_tier


def test_aborts_before_during_and_after_a_transfer_in_a_thousand_orders():
    """A prefix on disk alone, three requests that want it, and a disk that answers when it likes: no block is reused
    while a copy from or to it runs, late answers bring nothing, and nothing stays owned."""
    writer = engine(has_disk=True, num_blocks=9)
    writer.run([sequence("first", SHARED[:16] + [1], 1)])
    writer.run([sequence("churn", [(5 * i) % 83 + 100 for i in range(32)], 1)])
    assert len(writer.store.blocks) >= 4
    num_hits = num_aborted = 0
    for seed in range(1000):
        random = np.random.default_rng(seed)
        host = engine(has_disk=True, overlap=bool(seed % 2), num_blocks=9, num_host_blocks=int(random.integers(3, 9)))
        host.store.blocks.update(writer.store.blocks)
        host.store.complete_all = lambda: None
        now = [0.0]
        host.scheduler.tiers._clock = lambda now=now: now[0]
        work = [sequence(str(at), SHARED[:16] + [at], 2) for at in range(3)]
        coming = list(work)
        while True:
            action = random.random()
            if action < 0.2 and coming:
                host.add(coming.pop())
            elif action < 0.5 and host.store.under_way:
                host.store.complete(int(random.integers(9)), fails=random.random() < 0.1)
            elif action < 0.55 and (alive := [one for one in work if not one.finished and one not in coming]):
                host.abort(alive[random.integers(len(alive))])
                num_aborted += 1
            elif action < 0.57:
                now[0] += 60.0  # whoever waits for the disk gives up
            elif action < 0.58:
                host.blocks.flush()
            elif host.scheduler.has_work or host.in_flight:
                host.step()
            elif not coming:
                break
        host.run([sequence("last", [99], 1)])  # with whose step those copies go that are still due
        while host.store.under_way:
            host.store.complete()
            host.blocks.tiers.poll()
        host.blocks.tiers.poll()
        assert host.blocks.check_integrity() == []
        for one in work:
            assert output(one) == expected_output(one.tokens[: one.num_prompt].tolist(), one.num_output)
        assert not host.scheduler.awaits_tier and host.blocks.num_used_blocks == host.scheduler.num_waiting == 0
        assert all((pool.num_owners[1:] == 0).all() for pool in host.blocks._swap.pools), "a host block is still owned"
        num_hits += host.blocks.tier_stats.num_disk_hit_tokens > 0
    assert num_hits > 300 and num_aborted > 300
