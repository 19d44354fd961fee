"""The source document's numbers once more, not from a formula but from the real scheduler and block manager at work."""

from __future__ import annotations

import numpy as np
import pytest

from jserve.kv import BlockManager, GroupSpec
from jserve.planner.devices import find_device
from jserve.planner.roofline import Roofline
from jserve.planner.shapes import find_model
from jserve.scheduler import Scheduler, SchedulerLimits
from jserve.simulator.baselines import StaticBatching, WholePrefill
from jserve.simulator.clock import simulate
from jserve.simulator.engine import EngineSettings, EngineSystem
from jserve.simulator.steps import one_second, roofline_seconds
from jserve.simulator.workload import SimRequest
from tests.support.host_engine import sequence

LLAMA = Roofline(find_model("llama-3-8b"), find_device("h100-80gb"))
HALF = Roofline(find_model("llama-3-8b"), find_device("h100-80gb"), compute_efficiency=0.5)
LONG = 32_768
STREAMS = 32


class Watched(EngineSystem):
    """Remembers what each step gave to each request."""

    def __init__(self, settings):
        super().__init__(settings)
        self.steps: list[dict[int, int]] = []

    def schedule(self, now):
        step = super().schedule(now)
        if step is not None:
            self.steps.append(dict(zip(step.numbers, map(int, step.granted))))
        return step

    def chunks(self, number: int) -> list[int]:
        return [step[number] for step in self.steps if number in step]


def settings(**changes) -> EngineSettings:
    """A budget of 2,048 tokens, blocks of 16, memory for all."""
    return EngineSettings(5_000, 16, 40_000, 2048, 64, step_cost_tokens=295, overlap=False, **changes)


def streams_and_a_long_prompt(num_streams: int = STREAMS, output: int = 60) -> list[SimRequest]:
    streams = [SimRequest(number, 0.0, 1_000, output) for number in range(num_streams)]
    return [*streams, SimRequest(num_streams, 30.0 if num_streams else 0.0, LONG, 1)]


def test_a_prompt_of_32768_takes_16_steps_alone_and_17_beside_32_decodes():
    """One bucket, so that the last chunk is not cut to fill a smaller one."""
    alone = Watched(settings(token_buckets=(2048,)))
    simulate(alone, streams_and_a_long_prompt(0), one_second)
    assert alone.chunks(0) == [2048] * 16
    beside = Watched(settings(token_buckets=(2048,)))
    simulate(beside, streams_and_a_long_prompt(), one_second)
    chunks = beside.chunks(STREAMS)
    assert chunks == [2016] * 16 + [LONG - 16 * 2016] and len(chunks) == 17
    during = [step for step in beside.steps if STREAMS in step]
    assert all(sum(step.values()) <= 2048 and sum(number < STREAMS for number in step) == STREAMS for step in during)
    assert {sum(step.values()) for step in during[:-1]} == {2048}, "tokens a step are constant while the prompt lasts"


def longest_gap(system, roofline) -> float:
    load = [*streams_and_a_long_prompt(output=600)[:-1], SimRequest(STREAMS, 2.0, LONG, 1)]
    run = simulate(system, load, roofline_seconds(roofline))
    return float(run.gaps(range(STREAMS), after=2.0).max())


@pytest.mark.parametrize("roofline, stall_s", [(LLAMA, 0.75), (HALF, 1.5)])
def test_a_whole_prefill_stalls_the_decodes_and_chunks_bound_the_gap(roofline, stall_s):
    whole = WholePrefill(
        "whole", num_rows=64, num_blocks=5_000, block_size=16, max_context=40_000, budget=40_000, mix=False
    )
    assert longest_gap(whole, roofline) == pytest.approx(stall_s, rel=0.02)
    assert longest_gap(EngineSystem(settings()), roofline) <= stall_s / 10


def test_chunks_take_30_ms_first_and_63_ms_last():
    run = simulate(EngineSystem(settings()), [SimRequest(0, 0.0, LONG, 1)], roofline_seconds(LLAMA))
    assert (round(1e3 * run.step_seconds[0]), round(1e3 * run.step_seconds[-1])) == (30, 63)
    whole = LLAMA.prefill(LONG)
    assert whole.flops == pytest.approx(7.39e14, rel=1e-3)
    layers = find_model("llama-3-8b").num_parameters - 2 * 128_256 * 4_096
    assert round(layers / 1e9, 2) == 6.98


def test_a_shared_prefix_of_2010_tokens_leaves_210_of_2210_to_prefill():
    system = Watched(settings())
    load = [SimRequest(number, 10.0 * number, 2_210, 1, group=1, shared=2_010) for number in range(2)]
    simulate(system, load, one_second)
    assert (sum(system.chunks(0)), sum(system.chunks(1))) == (2_210, 210)
    assert system.scheduler.blocks.stats.num_hit_tokens == 2_000 == 125 * 16


def test_skewed_outputs_keep_28_percent_of_a_static_batch_busy():
    outputs = (10, 50, 200, 2000)
    run = simulate(StaticBatching(4, 4096), [SimRequest(n, 0.0, 1, out) for n, out in enumerate(outputs)], one_second)
    assert run.num_steps == 2000 and sum(run.step_useful) == 2_260
    assert (sum(run.step_useful) / 8_000, round(8_000 / 2_260, 1)) == (0.2825, 3.5)


def test_blocks_of_16_waste_seven_and_a_half_tokens_a_request():
    lengths = np.arange(993, 1009)  # every remainder once, 1,000.5 on average
    blocks = BlockManager(
        groups=[GroupSpec()], num_blocks=[16 * 64], block_size=16, num_slots=16, max_blocks_per_seq=64
    )
    scheduler = Scheduler(SchedulerLimits(17_000, 16, (17_000,), (16,), 32), blocks)
    for number, length in enumerate(lengths):
        scheduler.add(sequence(str(number), [number] * int(length), 1))
    scheduler.schedule()
    waste = (blocks.num_used_blocks * 16 - lengths.sum()) / len(lengths)
    assert waste == 7.5 and waste / 1_000 == 0.0075
