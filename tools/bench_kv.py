"""Host time of KV memory: a decode step (of the block manager, and of the whole scheduler) at many pool sizes, and the
prefix indexes against each other.

    python tools/bench_kv.py [--json] [--quick]

Needs no device. Absolute times depend on the machine; the ratios are what to look at.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator

import numpy as np

from jserve.engine.outputs import apply
from jserve.kv import BlockManager, GroupSpec
from jserve.request import SamplingParams
from jserve.runner.fake_runner import FakeRunner
from jserve.sampling.limits import ModelLimits
from jserve.sampling.validate import resolve
from jserve.scheduler import Scheduler, SchedulerLimits, Sequence
from jserve.scheduler.buckets import default_sequence_buckets, default_token_buckets

BLOCK_SIZE = 16
NUM_SLOTS = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--quick", action="store_true", help="fewer steps and requests")
    options = parser.parse_args()
    scale, sizes = 1 if options.quick else 5, [10**power for power in (3, 4, 5, 6)]
    report = {
        "step_microseconds": {f"{size:.0e}": step_times(size, 200 * scale) for size in sizes},
        "schedule_microseconds": {f"{size:.0e}": schedule_time(size, 100 * scale) for size in sizes},
        "step_microseconds_per_slots": {slots: step_times(10_000, 200 * scale, slots) for slots in (64, 128, 256)},
        "waiting_head_microseconds": {index: waiting_head_time(index) for index in ("hash", "radix")},
        "tiers": compare_tiers(80 * scale),
        "workloads": {name: compare_indexes(make, 40 * scale) for name, make in WORKLOADS.items()},
    }
    print(json.dumps(report) if options.json else as_text(report))


def step_times(num_blocks: int, num_steps: int, num_slots: int = NUM_SLOTS) -> dict[str, float]:
    """Microseconds of a decode step of all slots (grow_each, commit_each) in a pool where every free block is a cached
    one, so that each new block evicts. spread: a sixteenth of the slots fills a block in each step; aligned: all
    slots do, in one step of sixteen; host_tier: spread, with a host tier that gets what is evicted and drops as much."""
    spread = np.arange(num_slots) % BLOCK_SIZE
    return {
        "spread": step_time(num_blocks, num_steps, num_slots, spread),
        "aligned": step_time(num_blocks, 30, num_slots, np.zeros(num_slots, int)),
        "host_tier": step_time(num_blocks, num_steps, num_slots, spread, num_blocks),
    }


def step_time(
    num_blocks: int, num_samples: int, num_slots: int, offsets: np.ndarray, num_host_blocks: int | None = None
) -> float:
    """Sequences start `offsets` tokens into a block and are started anew after three blocks. The lower quartile of the
    steps in which a block is full: other processes on the machine disturb the rest."""
    kv = make_manager(num_blocks, "radix", num_slots, num_host_blocks)
    fill_with_cached(kv, num_blocks + (num_host_blocks or 0))
    random = np.random.default_rng(0)
    tokens = random.integers(0, 50_000, (num_slots, 4 * BLOCK_SIZE)).astype(np.int32)
    slots, num_computed = np.arange(num_slots), offsets.copy()
    for slot in slots.tolist():
        kv.admit(slot, tokens[slot, :1], use_cache=False)
        kv.grow(slot, int(num_computed[slot]))
        kv.commit(slot, tokens[slot], int(num_computed[slot]))
    times = []
    while len(times) < num_samples:
        for slot in np.flatnonzero(num_computed == 3 * BLOCK_SIZE).tolist():
            kv.free(slot)
            tokens[slot] = random.integers(0, 50_000, tokens.shape[1])
            kv.admit(slot, tokens[slot, :1], use_cache=False)
            num_computed[slot] = 0
        fills_blocks = ((num_computed > 0) & (num_computed % BLOCK_SIZE == 0)).any()
        started = time.perf_counter()
        kv.commit_each(slots, tokens, num_computed)
        assert kv.grow_each(slots, num_computed + 1) == num_slots
        if num_host_blocks is not None:
            kv.saves_arrived(kv.take_saves())
        if fills_blocks:
            times.append(time.perf_counter() - started)
        num_computed += 1
    assert kv.check_integrity() == []
    return 1e6 * float(np.quantile(times, 0.25))


def schedule_time(num_blocks: int, num_steps: int) -> float:
    """CPU microseconds of schedule() and apply() for a step of all slots in a pool where every free block is a cached
    one: sequences decode, end, and others enter. The median."""
    kv = make_manager(num_blocks, "radix", NUM_SLOTS)
    fill_with_cached(kv, num_blocks)
    budget = 2 * NUM_SLOTS
    limits = SchedulerLimits(budget, NUM_SLOTS, default_token_buckets(budget), default_sequence_buckets(NUM_SLOTS))
    scheduler, runner = Scheduler(limits, kv), FakeRunner(NUM_SLOTS)
    model = ModelLimits(context_length=4096, vocab_size=1000)
    greedy = [resolve(SamplingParams(temperature=0.0, max_tokens=count), model, 8) for count in range(8, 25)]
    random, added = np.random.default_rng(0), 0

    def add() -> None:
        nonlocal added
        tokens = random.integers(0, 50_000, 8).astype(np.int32)
        scheduler.add(Sequence(str(added), tokens, greedy[added % len(greedy)]))
        added += 1

    for _ in range(NUM_SLOTS + 20):
        add()
    times = []
    for step in range(num_steps + 30):
        started = time.thread_time()
        plan = scheduler.schedule()
        planned = time.thread_time()
        runner.launch(plan)
        output = runner.collect()
        collected = time.thread_time()
        result = apply(scheduler, plan, output)
        if step >= 30:
            times.append(planned - started + time.thread_time() - collected)
        for _ in result.ended:
            add()
    assert kv.check_integrity() == []
    return 1e6 * float(np.median(times))


def waiting_head_time(index: str) -> float:
    """Asking at every step whether a wholly cached prompt of 32,000 tokens can enter a pool with one block to spare."""
    kv = make_manager(2_002, index, 2)
    tokens = np.arange(32_000, dtype=np.int32)
    run_request(kv, tokens, np.zeros(0, np.int32))
    times = [timed(lambda: kv.can_admit(tokens, headroom=2)) for _ in range(30)]
    return 1e6 * float(np.median(times))


Request = tuple[np.ndarray, np.ndarray]  # prompt, output


def shared_prefix(random: np.random.Generator, count: int) -> Iterator[Request]:
    """Sixteen system prompts of 2,000 tokens, each request with 100 to 300 tokens of its own."""
    prompts = random.integers(0, 50_000, (16, 2_000)).astype(np.int32)
    for _ in range(count):
        own = random.integers(0, 50_000, random.integers(100, 300)).astype(np.int32)
        yield np.concatenate([prompts[random.integers(16)], own]), own[:64]


def multi_turn(random: np.random.Generator, count: int) -> Iterator[Request]:
    """Forty conversations side by side, each turn with all turns before it; started anew after 8,000 tokens."""
    histories = [np.zeros(0, np.int32)] * 40
    for _ in range(count):
        user = random.integers(len(histories))
        said = random.integers(0, 50_000, random.integers(20, 400)).astype(np.int32)
        prompt = np.concatenate([histories[user], said])
        output = random.integers(0, 50_000, 150).astype(np.int32)
        yield prompt, output
        histories[user] = np.concatenate([prompt, output]) if len(prompt) < 8_000 else np.zeros(0, np.int32)


def tree(random: np.random.Generator, count: int) -> Iterator[Request]:
    """Branches of a search tree: each request continues a random node by 50 to 150 tokens."""
    nodes = [random.integers(0, 50_000, 1_000).astype(np.int32)]
    for _ in range(count):
        branch = random.integers(0, 50_000, random.integers(50, 150)).astype(np.int32)
        prompt = np.concatenate([nodes[random.integers(len(nodes))], branch])
        output = random.integers(0, 50_000, 64).astype(np.int32)
        yield prompt, output
        nodes = (nodes + [np.concatenate([prompt, output])])[-200:]


WORKLOADS = {"shared prefix": shared_prefix, "multi-turn": multi_turn, "tree": tree}


def compare_indexes(make: Callable[[np.random.Generator, int], Iterator[Request]], count: int) -> dict[str, object]:
    """The same requests through both, in turns; the pool holds about half of what is worth keeping."""
    managers = {index: make_manager(2_500, index, 2) for index in ("hash", "radix")}
    times = {index: np.zeros((count, 2)) for index in managers}
    for place, (prompt, output) in enumerate(make(np.random.default_rng(1), count)):
        for index in sorted(managers, reverse=bool(place % 2)):
            times[index][place] = run_request(managers[index], prompt, output)
    result: dict[str, object] = {}
    for index, kv in managers.items():
        assert kv.check_integrity() == []
        admit, rest = 1e6 * np.median(times[index], axis=0)
        result[index] = {
            "hit_rate": kv.stats.num_hit_tokens / kv.stats.num_queried_tokens,
            "admit_microseconds": float(admit),
            "rest_microseconds": float(rest),
        }
    totals = {index: times[index].sum(axis=1) for index in managers}
    result["radix_time_per_hash_time"] = float(np.median(totals["radix"] / totals["hash"]))
    return result


def compare_tiers(count: int) -> dict[str, dict[str, float]]:
    """Conversations whose turns come too far apart for the pool: hit rates without and with host blocks below it."""
    result = {}
    for num_host_blocks in (None, 2_500, 10_000):
        kv = make_manager(2_500, "radix", 2, num_host_blocks)
        times = []
        for prompt, output in multi_turn(np.random.default_rng(1), count):
            started = time.perf_counter()
            if kv.tiers is not None and (fetch := kv.tiers.begin_fetch(prompt)) is not None:
                assert kv.tiers.advance_fetch(fetch, 10**6)
                kv.tiers.end_fetch(fetch)
                kv.take_loads()
                kv.tiers.poll()
            run_request(kv, prompt, output)
            kv.saves_arrived(kv.take_saves())
            times.append(time.perf_counter() - started)
        assert kv.check_integrity() == []
        result[str(num_host_blocks or 0)] = {
            "hit_rate": kv.stats.num_hit_tokens / kv.stats.num_queried_tokens,
            "microseconds": 1e6 * float(np.median(times)),
        }
    return result


def run_request(kv: BlockManager, prompt: np.ndarray, output: np.ndarray) -> np.ndarray:
    """Seconds of admission (can_admit and admit), and of all else (grow, commit in two parts, free)."""
    tokens = np.concatenate([prompt, output])
    started = time.perf_counter()
    assert kv.can_admit(prompt)
    kv.admit(0, prompt)
    admitted = time.perf_counter()
    assert kv.grow(0, len(tokens))
    kv.commit(0, tokens, len(prompt))
    kv.commit(0, tokens, len(tokens))
    kv.free(0)
    return np.array([admitted - started, time.perf_counter() - admitted])


def make_manager(num_blocks: int, index: str, num_slots: int, num_host_blocks: int | None = None) -> BlockManager:
    return BlockManager(
        groups=[GroupSpec()],
        num_blocks=[num_blocks],
        block_size=BLOCK_SIZE,
        num_slots=num_slots,
        max_blocks_per_seq=2_048,
        index=index,
        num_host_blocks=None if num_host_blocks is None else [num_host_blocks],
        host_tier=num_host_blocks is not None,
    )


def fill_with_cached(kv: BlockManager, num_blocks: int) -> None:
    """Writes about num_blocks blocks, each other's successors in the pool and in what lies below it."""
    chunk = min(1_000, kv.num_total_blocks // 4)
    for start in range(0, (num_blocks - chunk) * BLOCK_SIZE, chunk * BLOCK_SIZE):
        tokens = np.arange(start, start + chunk * BLOCK_SIZE, dtype=np.int32)
        run_request(kv, tokens, tokens[:0])
        kv.saves_arrived(kv.take_saves())


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def as_text(report: dict) -> str:
    lines = [f"decode step of {NUM_SLOTS} slots, grow_each + commit_each, blocks of {BLOCK_SIZE}"]
    base = report["step_microseconds"]["1e+03"]["spread"]
    for size, figures in report["step_microseconds"].items():
        lines.append(
            f"  {size} blocks: {figures['spread']:6.0f} us, {figures['spread'] / base:.2f}x of 1e+03; "
            f"{figures['aligned']:6.0f} us where all slots fill a block in the same step; "
            f"{figures['host_tier']:6.0f} us with a host tier"
        )
    lines.append(f"schedule + apply of a step of {NUM_SLOTS} sequences that decode, end and enter")
    lines += [f"  {size} blocks: {figure:6.0f} us" for size, figure in report["schedule_microseconds"].items()]
    for slots, figures in report["step_microseconds_per_slots"].items():
        lines.append(f"  {slots} slots: {figures['spread']:6.0f} us, {figures['spread'] / slots:.2f} us a slot")
    for index, figure in report["waiting_head_microseconds"].items():
        lines.append(f"can_admit of a waiting, wholly cached prompt of 32,000 tokens, {index}: {figure:.0f} us")
    for num_host_blocks, figures in report["tiers"].items():
        lines.append(
            f"multi-turn, 2,500 blocks, {num_host_blocks} host blocks: hit rate {figures['hit_rate']:.3f}, "
            f"{figures['microseconds']:.0f} us a request"
        )
    for name, result in report["workloads"].items():
        for index in ("hash", "radix"):
            figures = result[index]
            lines.append(
                f"{name}, {index}: hit rate {figures['hit_rate']:.3f}, "
                f"admit {figures['admit_microseconds']:.0f} us, rest {figures['rest_microseconds']:.0f} us a request"
            )
        lines.append(f"{name}: radix takes {result['radix_time_per_hash_time']:.2f}x the time of hash")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
