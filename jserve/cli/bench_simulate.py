"""`jserve bench simulate`: the real scheduler over a device that only takes time, against what came before it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jserve.bench import report
from jserve.cli.command import Command
from jserve.cli.plan import roofline_from
from jserve.cli.simulate_flags import add_arguments
from jserve.planner.capacity import Memory, plan_memory
from jserve.scheduler import PolicySettings
from jserve.simulator import capacity, workload
from jserve.simulator.clock import Run, simulate
from jserve.simulator.engine import EngineSettings, EngineSystem
from jserve.simulator.figures import comparison, figures, stall_figures
from jserve.simulator.steps import StepSeconds, one_second, roofline_seconds, table_seconds
from jserve.simulator.systems import SYSTEMS, make_systems
from jserve.simulator.timeline import write_timeline
from jserve.simulator.workload import SimRequest, StallLoad

UNIT = "unit"
"""The device on which every step takes one second: times are step numbers."""


@dataclass(frozen=True)
class Setup:
    """Everything that the flags say."""

    requests: list[SimRequest]
    concurrency: int | None
    settings: EngineSettings
    memory: Memory | None
    step_seconds: StepSeconds
    names: tuple[str, ...]
    stalls: StallLoad | None
    about: dict[str, object]


def run(arguments: argparse.Namespace) -> int:
    problem = _bad_usage(arguments)
    if problem:
        print(f"jserve bench simulate: {problem}\ntry: jserve bench simulate --help", file=sys.stderr)
        return 2
    setup = _setup(arguments)
    if arguments.capacity:
        return _run_capacity(arguments, setup)
    makers = make_systems(setup.memory, setup.settings, arguments.rows)
    runs, answers = [], {}
    for name in setup.names:
        stop = (lambda run: run.step_ends[-1] >= setup.stalls.end_s) if setup.stalls else (lambda run: False)
        one = simulate(
            makers[name](), setup.requests, setup.step_seconds, concurrency=setup.concurrency,
            picture_steps=arguments.picture_steps if arguments.plot else 0, stop=stop,
        )
        runs.append(one)
        answers[name] = figures(one, arguments.metric_percentiles, arguments.goodput) | _own_figures(one, setup)
    head = report.header("simulate", **setup.about)
    answer = head | (answers[setup.names[0]] if len(answers) == 1 else {}) | {"systems": answers}
    _deliver(answer, comparison(answers), arguments)
    if arguments.plot:
        title = f"jserve bench simulate: {setup.about['model_id']}"
        write_timeline(arguments.plot, runs, title, in_steps=_is_unit(arguments))
        print(f"timeline written to {arguments.plot}", file=sys.stderr)
    return 0


def _own_figures(run: Run, setup: Setup) -> dict[str, object]:
    """What only some loads have: the streams' gaps beside long prompts, the places of the toy examples."""
    if setup.stalls is not None:
        return stall_figures(run, setup.stalls)
    if all(request.prompt == 1 for request in setup.requests):
        found = {"useful_place_share": sum(run.step_useful) / (run.num_steps * run.num_rows)}
        return found | ({"first_step_of_fifth": run.first_steps[4]} if 4 in run.first_steps else {})
    return {}


def _run_capacity(arguments: argparse.Namespace, setup: Setup) -> int:
    makers = make_systems(setup.memory, setup.settings, arguments.rows)
    prompts, outputs = zip(*((request.prompt, request.output) for request in setup.requests))
    lengths = workload.Lengths(np.array(prompts), np.array(outputs))
    adapted = {"jserve": lambda target: EngineSystem(_adapted(setup.settings, target))}

    def said(one: capacity.Capacity) -> None:
        print(f"{one.system} at {1e3 * one.target_s:g} ms: {one.rate:.2f} requests/s", file=sys.stderr, flush=True)

    found = capacity.compare(
        {name: makers[name] for name in setup.names}, adapted, lengths, setup.step_seconds,
        [target / 1e3 for target in arguments.capacity], said, seed=arguments.seed,
    )
    answer = report.header("capacity", **setup.about) | {"capacity": [dataclasses.asdict(one) for one in found]}
    _deliver(answer, capacity.table(found), arguments)
    if arguments.plot:
        title = f"Capacity under a target for P99 time between tokens: {setup.about['model_id']}"
        is_picture = arguments.plot.endswith(".svg")
        Path(arguments.plot).write_text(capacity.plot_svg(found) if is_picture else capacity.plot_html(found, title))
        print(f"plot written to {arguments.plot}", file=sys.stderr)
    return 0


def _adapted(settings: EngineSettings, target_s: float) -> EngineSettings:
    """Our settings for one target: the scheduler keeps it by itself."""
    return dataclasses.replace(settings, policy=dataclasses.replace(settings.policy, target_tbt_s=target_s))


def _setup(arguments: argparse.Namespace) -> Setup:
    requests, concurrency, stalls, context = _load(arguments)
    names = SYSTEMS if arguments.system == "all" else tuple(arguments.system.split(","))
    slots = arguments.rows or arguments.max_num_seqs
    settings = dict(
        block_size=arguments.block_size,
        max_context=context,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_num_seqs=slots,
        token_buckets=arguments.token_buckets,
        prefix_cache=arguments.prefix_cache,
        overlap=arguments.overlap and not _is_unit(arguments),
        policy=PolicySettings(arguments.policy, target_tbt_s=_seconds(arguments.target_tbt_ms)),
    )
    about: dict[str, object] = {"dataset_name": arguments.dataset_name, "num_prompts": len(requests)}
    if _is_unit(arguments):
        num_blocks = 1 + slots * (1 - (-context // arguments.block_size))  # memory never decides
        memory, step_seconds, cost = None, one_second, 32
        about |= {"model_id": "unit steps", "device": UNIT}
    else:
        roofline = roofline_from(arguments)
        memory = plan_memory(
            roofline,
            block_size=arguments.block_size,
            memory_fraction=arguments.memory_fraction,
            reserve_bytes=arguments.reserve_gb * 1e9,
        )
        num_blocks, cost = memory.num_blocks, roofline.balanced_tokens
        step_seconds = table_seconds(arguments.step_table) if arguments.step_table else roofline_seconds(roofline)
        about |= {
            "model_id": roofline.model.name, "device": roofline.device.name,
            "tensor_parallel_size": roofline.tensor_parallel_size,
            "compute_efficiency": roofline.compute_efficiency, "bandwidth_efficiency": roofline.bandwidth_efficiency,
        }
        if stalls is not None:
            begin = 1.0 + 1.5 * stalls.streams * roofline.prefill(stalls.context).seconds
            stalls = dataclasses.replace(stalls, begin_s=begin)
            requests = stalls.requests(arguments.stream_output)
    return Setup(
        requests, concurrency, EngineSettings(num_blocks=num_blocks, step_cost_tokens=cost, **settings), memory,
        step_seconds, names, stalls, about,
    )


def _load(arguments: argparse.Namespace) -> tuple[list[SimRequest], int | None, StallLoad | None, int]:
    """(requests, concurrency of a closed loop, the stall load, context)."""
    concurrency = arguments.max_concurrency
    if arguments.outputs:
        repeated = arguments.outputs * arguments.repeat
        requests = [SimRequest(number, 0.0, 1, output) for number, output in enumerate(repeated)]
        return requests, concurrency, None, arguments.context or max(arguments.outputs) + 1
    if arguments.dataset_name == "stalls":
        stalls = StallLoad(
            arguments.streams, arguments.stream_context, arguments.long_prompt, arguments.long_every, arguments.num_long
        )
        context = max(stalls.context, stalls.long_prompt) + arguments.stream_output
        return [], None, stalls, arguments.context or context
    if arguments.dataset_name == "trace":
        requests, timed = workload.read_trace(arguments.dataset_path)
        if not timed and concurrency is None:
            times = workload.arrival_times(len(requests), arguments.request_rate, arguments.burstiness, arguments.seed)
            requests = [dataclasses.replace(one, arrival=float(time)) for one, time in zip(requests, times)]
        return requests, concurrency, None, arguments.context or max(request.total for request in requests)
    context = arguments.context or 8192
    if arguments.dataset_name == "lognormal":
        lengths = workload.lognormal_lengths(arguments.num_prompts, arguments.seed, context=context)
    else:
        lengths = workload.uniform_lengths(
            arguments.num_prompts, arguments.random_input_len, arguments.random_output_len,
            arguments.random_range_ratio, arguments.seed,
        )
    times = workload.arrival_times(arguments.num_prompts, arguments.request_rate, arguments.burstiness, arguments.seed)
    return lengths.requests(times), concurrency, None, context


def _bad_usage(arguments: argparse.Namespace) -> str | None:
    names = arguments.system.split(",")
    if arguments.system != "all" and (unknown := set(names) - set(SYSTEMS)):
        return f"--system {','.join(sorted(unknown))}: expected all, or some of {','.join(SYSTEMS)}"
    if arguments.dataset_name == "trace" and not arguments.dataset_path:
        return "--dataset-name trace needs --dataset-path FILE"
    if arguments.dataset_name == "stalls" and _is_unit(arguments):
        return "--dataset-name stalls needs --model and --device"
    if not _is_unit(arguments) and arguments.model is None:
        return "--model is missing (or --device unit: every step takes one second)"
    if arguments.capacity and (_is_unit(arguments) or math.isfinite(arguments.request_rate) or arguments.outputs):
        return "--capacity finds the rate itself: it needs --model, and no --request-rate or --outputs"
    return None


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1e3


def _is_unit(arguments: argparse.Namespace) -> bool:
    return arguments.device == UNIT


def _deliver(answer: dict[str, object], text: str, arguments: argparse.Namespace) -> None:
    print(json.dumps(answer) if arguments.json else text)
    if arguments.save_result:
        print(f"saved {report.save(answer, arguments.result_dir)}", file=sys.stderr)


COMMAND = Command(
    usage="--model MODEL --device DEVICE [flags]",
    summary="Thousands of requests through the real scheduler and block manager over a device that only takes time,"
    " beside three baselines.",
    add_arguments=add_arguments,
    run=run,
    epilog="""\
examples:
  jserve bench simulate --device unit --rows 4 --outputs 2,5,3,8,4,3,5,6 --plot gantt.html
  jserve bench simulate --device unit --rows 4 --outputs 10,50,200,2000 --system static
  jserve bench simulate --model llama-3-8b --dataset-name lognormal --request-rate 8 --num-prompts 2000
  jserve bench simulate --model llama-3-8b --dataset-name stalls --compute-efficiency 0.5 --plot stalls.html
  jserve bench simulate --model llama-3-8b --dataset-name lognormal --num-prompts 300 --capacity 25,50,100,200

systems:
  jserve          this engine: continuous batching, paged KV, chunked prefill, padding to its buckets counted
  static          a batch runs until its longest output is done; rows hold the longest context
  preallocated    continuous batching (Orca): rows hold the longest context, prompts are computed in one step
  whole-prefill   continuous batching over paged KV, whole prefills ahead of decodes""",
)
