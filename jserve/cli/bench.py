"""`jserve bench MODE`: flags of the modes, and what they share; the measuring itself is jserve.bench."""

from __future__ import annotations

import argparse
import asyncio
import difflib
import functools
import json
import sys
import time
from collections.abc import Callable

from jserve.bench import latency, startup, throughput
from jserve.bench.driver import engine_stream, measure
from jserve.bench.load import RandomLoad, ordinary_token_ids
from jserve.cli import bench_compare, bench_host, bench_kernels, bench_serve, bench_simulate
from jserve.cli.bench_flags import add_load_flags, add_startup_flags
from jserve.cli.bench_load import deliver, labelled, load_from, save
from jserve.cli.command import Command
from jserve.cli.flags import NEAR, config_from, config_to_flags
from jserve.cli.progress import StartReport
from jserve.config import Config, ConfigError
from jserve.local_engine import start_engine

STARTUP_PROMPT_TOKENS = 16

USAGE = """\
usage: jserve bench MODE [flags]        jserve bench MODE --help tells more

  serve        a load against a running server: rates, concurrency, latency limits, sweeps
  compare      two saved reports, as ratios
  throughput   output tokens a second of the engine in this process, many requests at once
  latency      what a single stream feels: time to first token, time per token, percentiles
  startup      seconds from launch to ready and to the first token, cold and warm, by phase
  kernels      attention on this device, beside what it copies and multiplies
  host         what the host does for a step: schedule, build, apply, at so many running and waiting
  simulate     thousands of requests through the real scheduler over a device that only takes time
"""


def find(rest: list[str]) -> tuple[str, Command | None, list[str]]:
    """(name, command, its flags) of `jserve bench REST`; no command where help was asked or the mode does not exist."""
    mode = rest[0] if rest else ""
    if mode in COMMANDS:
        return f"bench {mode}", COMMANDS[mode], rest[1:]
    if mode in ("-h", "--help"):
        print(USAGE)
    elif mode:
        near = difflib.get_close_matches(mode, COMMANDS, n=1, cutoff=NEAR)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"jserve: unknown bench mode {mode!r}{hint}\ntry: jserve bench --help", file=sys.stderr)
    else:
        print(USAGE, file=sys.stderr)
    return "bench", None, rest


def _run_load(run: Callable, arguments: argparse.Namespace) -> int:
    load = load_from(arguments)
    options = {"concurrency": arguments.max_concurrency} if "max_concurrency" in arguments else {}
    options |= {
        "num_warmups": arguments.num_warmups,
        "percentiles": arguments.metric_percentiles,
        "goodput": arguments.goodput,
    }
    figures, records = asyncio.run(
        _measured(config_from(arguments), functools.partial(run, load=load, **options), load.num_prompts)
    )
    return deliver(figures, records, arguments)


async def _measured(config: Config, run: Callable, num_prompts: int):
    start = StartReport()
    engine = await start_engine(config, start)
    start.progress("requests", 0, num_prompts)
    try:
        done = 0

        def on_done(record) -> None:
            nonlocal done
            done += 1
            start.progress("requests", done, num_prompts)

        return await run(engine, on_done=on_done)
    finally:
        start.close()
        await engine.close()


def _run_startup(arguments: argparse.Namespace) -> int:
    if arguments.child:
        return asyncio.run(_start_once(config_from(arguments)))
    from jserve.weights.fetch import with_model_on_disk

    def line(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    config = config_from(arguments)
    on_disk = with_model_on_disk(config, line)
    try:
        flags = [*config_to_flags(arguments), f"--model.served_name={on_disk.model.served_name or config.model.path}"]
        figures = startup.run(flags, on_disk.model.path, arguments.num_warm, line)
    except startup.StartFailed as error:
        raise ConfigError(str(error)) from None
    figures = labelled(figures, arguments)
    print(json.dumps(figures) if arguments.json else startup.render(figures))
    save(figures, arguments)
    return 0


async def _start_once(config: Config) -> int:
    """One start as the child of `bench startup`: a JSON line of timestamps on stdout."""
    began_at = time.monotonic()
    phases = StartReport(quiet=True)
    engine = await start_engine(config, phases)
    ready_at = time.monotonic()
    load = RandomLoad(num_prompts=1, input_len=STARTUP_PROMPT_TOKENS, output_len=1).checked(engine.info.context_length)
    token_ids = ordinary_token_ids(engine.info)
    asked_at = time.monotonic()
    record = await measure(engine_stream(engine), load.requests(token_ids)[0])
    answer = {
        "began_at": began_at,
        "ready_at": ready_at,
        # Drawing the prompt above is the bench's own time, not the engine's.
        "first_token_at": ready_at + time.monotonic() - asked_at,
        "phases_s": phases.seconds,
        "model_id": engine.info.name,
        "about": {"dtype": engine.info.dtype, "kv_dtype": engine.info.kv_dtype, **throughput.machine()},
        "compiles_after_ready": throughput.step_counters(engine)["compiles_after_ready"],
    }
    await engine.close()
    print(json.dumps(answer))
    return 1 if record.error else 0


COMMANDS = {
    "serve": bench_serve.COMMAND,
    "compare": bench_compare.COMMAND,
    "throughput": Command(
        usage="[--max-concurrency N] [--model MODEL] [flags]",
        summary="Output tokens a second of the engine in this process; start-up and warm-up are outside the figures.",
        add_arguments=functools.partial(add_load_flags, num_prompts=128, concurrency=True, percentiles=(99,)),
        run=functools.partial(_run_load, throughput.run),
        epilog="example:\n  jserve bench throughput --num-prompts 64 --max-concurrency 8 --json",
    ),
    "latency": Command(
        usage="[--num-prompts N] [--model MODEL] [flags]",
        summary="What a single stream feels: one request at a time in this process.",
        add_arguments=functools.partial(
            add_load_flags, num_prompts=10, concurrency=False, percentiles=latency.PERCENTILES
        ),
        run=functools.partial(_run_load, latency.run),
    ),
    "startup": Command(
        usage="[--num-warm N] [--model MODEL] [flags]",
        summary="Seconds from launching the process to a ready engine and to its first token, cold and warm.",
        add_arguments=add_startup_flags,
        run=_run_startup,
    ),
    "kernels": bench_kernels.COMMAND,
    "host": bench_host.COMMAND,
    "simulate": bench_simulate.COMMAND,
}
