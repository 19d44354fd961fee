"""`jserve plan`: memory, step times, chunks, buckets and compile count of a model on a device, before it is rented."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys

from jserve.cli.command import Command
from jserve.cli.number_flags import number, whole, whole_list
from jserve.cli.plan_tables import print_tables
from jserve.config import BadUsage, Config
from jserve.planner import report
from jserve.planner.deployment import Question, Recommended, predict
from jserve.planner.devices import DEVICES, find_device
from jserve.planner.roofline import BYTES_OF, KV_BYTES_OF, Roofline
from jserve.planner.shapes import BUILT_IN, find_model
from jserve.simulator.engine import EngineSettings
from jserve.simulator.step_sizes import plan_buckets
from jserve.simulator.steps import one_second, roofline_seconds
from jserve.simulator.workload import read_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = Question(context=0)
    what = parser.add_argument_group("what is to run")
    what.add_argument(
        "-m", "--model", metavar="MODEL",
        help=f"config.json, a folder, a GGUF file, or {', '.join(BUILT_IN)}",
    )
    what.add_argument("-d", "--device", metavar="DEVICE", help=", ".join(DEVICES))
    what.add_argument(
        "--tensor-parallel-size", "--tp", type=whole(), metavar="N", help="devices that share it [a slice's; 1 GPU]"
    )
    what.add_argument("--dtype", choices=BYTES_OF, help="weights [bfloat16; cpu: float32]")
    what.add_argument("--kv-dtype", choices=KV_BYTES_OF, help="KV cache [dtype, or bfloat16 where that is narrower]")
    load = parser.add_argument_group("the load")
    load.add_argument("--context", type=whole(), metavar="N", help="longest sequence [the model's]")
    load.add_argument(
        "--length", type=whole(), default=defaults.mean_length, metavar="N",
        help="mean tokens a sequence [%(default)s]",
    )
    load.add_argument(
        "--batch", type=whole_list, default=defaults.batches, metavar="LIST",
        help="batches to time [1,8,32,128]",
    )
    load.add_argument(
        "--prompt", type=whole(), default=defaults.prompt, metavar="N",
        help="long prompt to cut in chunks [%(default)s]",
    )
    load.add_argument(
        "--decodes", type=whole(0), default=defaults.decodes, metavar="N",
        help="sequences that decode meanwhile [%(default)s]",
    )
    load.add_argument(
        "--shared-prefix", type=whole(0), default=defaults.shared_prefix, metavar="N",
        help="prompt tokens that others have too [%(default)s]",
    )
    load.add_argument(
        "--suffix", type=whole(), default=defaults.suffix, metavar="N",
        help="prompt tokens behind them [%(default)s]",
    )
    load.add_argument(
        "--target-tbt-ms", type=number(above=True), default=1e3 * defaults.target_tbt_s, metavar="MS",
        help="gap between tokens to keep [%(default)g]",
    )
    settings = parser.add_argument_group("settings")
    settings.add_argument(
        "--block-size", type=whole(), default=defaults.block_size, metavar="N",
        help="tokens a block [%(default)s]",
    )
    settings.add_argument("--budget", type=whole(), metavar="N", help="tokens a step [what is recommended]")
    settings.add_argument(
        "--memory-fraction", type=number(0, 1, above=True), default=defaults.memory_fraction, metavar="F",
        help="[%(default)s]",
    )
    settings.add_argument(
        "--reserve-gb", type=number(), default=defaults.reserve_bytes / 1e9, metavar="GB",
        help="activations and the rest [%(default)g]",
    )
    settings.add_argument(
        "--compute-efficiency", type=number(0, 1, above=True), default=1.0, metavar="F",
        help="share of the matrix rate [%(default)g]",
    )
    settings.add_argument(
        "--bandwidth-efficiency", type=number(0, 1, above=True), default=1.0, metavar="F",
        help="share of the bandwidth [%(default)g]",
    )
    buckets = parser.add_argument_group("token buckets from a trace")
    buckets.add_argument("--trace", metavar="FILE", help="JSON lines of prompt_tokens, output_tokens, maybe arrival")
    buckets.add_argument("--max-compiles", type=whole(), default=8, metavar="K", help="buckets to pick [%(default)s]")
    buckets.add_argument("--max-num-seqs", type=whole(), default=256, metavar="N", help="[%(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    if arguments.trace:
        return _plan_buckets(arguments)
    for flag in ("model", "device"):
        if getattr(arguments, flag) is None:
            print(f"jserve plan: --{flag} is missing\ntry: jserve plan --help", file=sys.stderr)
            return 2
    roofline = roofline_from(arguments)
    question = Question(
        context=arguments.context or roofline.model.context_length,
        mean_length=arguments.length,
        batches=arguments.batch,
        block_size=arguments.block_size,
        memory_fraction=arguments.memory_fraction,
        reserve_bytes=arguments.reserve_gb * 1e9,
        prompt=arguments.prompt,
        decodes=arguments.decodes,
        budget=arguments.budget,
        shared_prefix=arguments.shared_prefix,
        suffix=arguments.suffix,
        target_tbt_s=arguments.target_tbt_ms / 1e3,
    )
    plan = predict(roofline, question)
    answer = report.to_json(plan, compile_plan(plan.recommended))
    if arguments.json:
        print(json.dumps(answer))
    else:
        print_tables(answer)
    return 0


def _plan_buckets(arguments: argparse.Namespace) -> int:
    """`--trace`: the token buckets of least padding, as `serve` takes them."""
    requests, timed = read_trace(arguments.trace)
    budget, num_seqs = arguments.budget or 2048, min(arguments.max_num_seqs, arguments.budget or 2048)
    context = max(request.total for request in requests)
    settings = EngineSettings(
        num_blocks=1 + num_seqs * (1 - (-context // arguments.block_size)),
        block_size=arguments.block_size,
        max_context=context,
        max_num_batched_tokens=budget,
        max_num_seqs=num_seqs,
    )
    with_times = timed and arguments.model is not None and arguments.device is not None
    plan = plan_buckets(
        requests,
        arguments.max_compiles,
        settings,
        concurrency=None if with_times else num_seqs,
        step_seconds=roofline_seconds(roofline_from(arguments)) if with_times else one_second,
    )
    listed = ",".join(map(str, plan.token_buckets))
    if arguments.json:
        print(json.dumps(dataclasses.asdict(plan) | {"max_num_batched_tokens": budget, "max_num_seqs": num_seqs}))
        return 0
    load = "at the trace's times" if with_times else f"{num_seqs} requests at a time"
    print(
        f"{len(requests):,} requests, {load}: {plan.num_mixed_steps:,} steps with prefill\n"
        f"padding with these {len(plan.token_buckets)} buckets {plan.padded_share:.1%},"
        f" with as many powers of two {plan.padded_share_powers:.1%}\n\n"
        f"jserve serve --max-num-batched-tokens {budget} --max-num-seqs {num_seqs} --compile.token_buckets {listed}"
    )
    return 0


def roofline_from(arguments: argparse.Namespace) -> Roofline:
    """The step times of --model on --device; flags that are not there have their defaults."""
    model, device = find_model(arguments.model), find_device(arguments.device)
    asked = getattr(arguments, "tensor_parallel_size", None)
    devices = asked or math.gcd(device.num_devices, model.num_heads)
    if device.platform != "gpu" and devices > device.num_devices:
        raise BadUsage(f"tensor_parallel_size = {devices}: {device.name} has {device.num_devices} devices")
    dtype = arguments.dtype or ("float32" if device.platform == "cpu" else "bfloat16")
    kv_dtype = arguments.kv_dtype or (dtype if BYTES_OF[dtype] > 1 else "bfloat16")
    return Roofline(
        model, device, dtype, kv_dtype, devices, arguments.compute_efficiency, arguments.bandwidth_efficiency
    )


def compile_plan(recommended: Recommended) -> dict[str, object]:
    """What `serve` would compile with these settings, counted by the runner's own plan."""
    from jserve.runner.compile_plan import make_compile_plan

    config = Config().replace(
        "scheduler",
        max_num_batched_tokens=recommended.max_num_batched_tokens,
        max_num_seqs=recommended.max_num_seqs,
    )
    plan = make_compile_plan(config)
    counts = {
        "forward": len(plan.step_shapes), "heads": len(plan.head_rows), "samplers": len(plan.sampler_shapes), "scorers": 1,
    }
    return {
        "token_buckets": list(plan.token_buckets),
        "sequence_buckets": list(plan.sequence_buckets),
        **counts,
        "num_programs": sum(counts.values()),
    }


COMMAND = Command(
    usage="--model MODEL --device DEVICE [flags]",
    summary="Predicts memory, concurrency, step times, chunks and compile count of a model on a device; needs neither.",
    add_arguments=add_arguments,
    run=run,
    epilog="""\
examples:
  jserve plan --model llama-3-8b --device h100-80gb
  jserve plan --model qwen3-8b --device v6e-8 --context 32768 --block-size 64 --json
  jserve plan --model ./my-model/config.json --device h200 --batch 64,256
  jserve plan --trace lengths.jsonl --max-compiles 6      token buckets for `jserve serve`

Times are lower bounds: all weights and contexts read once at the full bandwidth, or all operations at the full rate;
--compute-efficiency and --bandwidth-efficiency say what your kernels reach.  GB, TB: powers of ten.""",
)
