"""`jserve bench serve`: a load against a running server, jserve's own or any that speaks OpenAI's API."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import sys
from collections.abc import Mapping

from jserve.bench import lag, report, serve, sweep, sweep_plot
from jserve.bench.arrivals import STRATEGIES, Ramp
from jserve.bench.driver import STALL_TIMEOUT_S
from jserve.bench.target import BACKENDS, ServerFacts, Target, ask
from jserve.cli.bench_flags import MergeTargets, add_dataset_flags, add_figure_flags, target
from jserve.cli.bench_load import deliver, labelled, load_from, save
from jserve.cli.client_flags import add_client_flags, client_access
from jserve.cli.command import Command
from jserve.cli.number_flags import number, number_list, whole
from jserve.cli.progress import StartReport
from jserve.config import ConfigError

NUM_PROMPTS = 128
SLO_PERCENTILES = (99.0,)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--backend", choices=BACKENDS, default="jserve", help="[%(default)s]")
    server.add_argument(
        "--address", "--base-url", metavar="ADDRESS",
        help="HOST:PORT of jserve [127.0.0.1:50051], or the URL of an OpenAI-compatible server"
        " [http://127.0.0.1:8000]",
    )
    server.add_argument("-m", "--model", metavar="NAME", help="for openai [the first that the server lists]")
    add_client_flags(parser)
    load = add_dataset_flags(parser, NUM_PROMPTS)
    load.add_argument(
        "--token-ids", type=_id_range, metavar="FIRST:LAST",
        help="draw prompts from these ids [the model's ordinary ones]",
    )
    pace = parser.add_argument_group("pace")
    pace.add_argument("--max-concurrency", type=whole(), metavar="N", help="a closed loop of so many, or a limit")
    pace.add_argument(
        "--request-rate", type=_rate, default=math.inf, metavar="R", help="requests a second, open loop [all at once]"
    )
    pace.add_argument(
        "--burstiness", type=number(above=True), default=1.0, metavar="B",
        help="gaps are gamma distributed; 1: Poisson; less: burstier [%(default)g]",
    )
    pace.add_argument("--ramp-up-strategy", choices=STRATEGIES, help="let the rate rise during the run")
    pace.add_argument("--ramp-up-start-rps", type=number(above=True), metavar="R", help="rate of the first request")
    pace.add_argument("--ramp-up-end-rps", type=number(above=True), metavar="R", help="rate of the last one")
    swept = parser.add_argument_group("sweep")
    swept.add_argument(
        "--sweep", type=_sweep, metavar="KIND:LIST",
        help="rate:1,2,4 or concurrency:1,8,32; rate:auto looks for the highest within --slo",
    )
    swept.add_argument(
        "--slo", nargs="+", type=_slo, action=MergeTargets, metavar="SLO",
        help=f"P99 limits such as ttft:2000 tpot:100, or {', '.join(sweep.SLOS)}",
    )
    add_figure_flags(parser, (99,))
    client = parser.add_argument_group("client")
    client.add_argument("--num-client-processes", type=whole(), metavar="N", help="[as many as the streams need]")
    client.add_argument(
        "--max-client-lag-ms", type=number(), metavar="MS",
        help="P99 lag above which nothing is reported; inf: report anyway [a quarter of the TPOT, at least 25]",
    )
    client.add_argument(
        "--stall-timeout-s", type=number(above=True), default=STALL_TIMEOUT_S, metavar="S",
        help="silence of all streams after which the run ends [%(default)g]",
    )


def run(arguments: argparse.Namespace) -> int:
    problem = _bad_usage(arguments)
    if problem:
        print(f"jserve bench serve: {problem}\ntry: jserve bench serve --help", file=sys.stderr)
        return 2
    try:
        return asyncio.run(_run_sweep(arguments) if arguments.sweep else _run_once(arguments))
    except serve.ClientFailed as error:
        raise ConfigError(str(error)) from None


async def _run_once(arguments: argparse.Namespace) -> int:
    facts = await _facts(arguments)
    figures, records = await _measured(arguments, facts, _pace(arguments), arguments.seed)
    if _is_refused(figures, arguments):
        return 1
    return deliver(figures, records, arguments)


async def _run_sweep(arguments: argparse.Namespace) -> int:
    facts = await _facts(arguments)
    plan = sweep.Sweep(arguments.sweep[0], arguments.sweep[1], arguments.slo)
    refused = []

    async def measure(value: float) -> dict[str, object]:
        print(f"{plan.kind} {value:g}", file=sys.stderr, flush=True)
        changed = {"request_rate": value} if plan.kind == "rate" else {"max_concurrency": int(value)}
        # Seeds differ from point to point: a point's prompts are not in the cache of an earlier one.
        seed = None if arguments.seed is None else arguments.seed + 1000 * len(seen)
        seen.append(value)
        figures, _ = await _measured(arguments, facts, dataclasses.replace(_pace(arguments), **changed), seed)
        if _is_refused(figures, arguments):
            refused.append(value)
        return figures

    seen: list[float] = []
    points, best = await sweep.run(plan, measure)
    if refused:
        return 1
    answer = report.header("sweep", model_id=facts.model_id, **facts.about) | {
        "backend": arguments.backend, "endpoint": _target(arguments).address, "sweep": plan.kind, "slo_ms": plan.slo_ms,
        "points": points, "highest_within_slo": None if best is None else best[plan.kind],
    }
    answer = labelled(answer, arguments)
    print(json.dumps(answer) if arguments.json else sweep.table(plan, points, best))
    save(answer, arguments)
    if arguments.plot:
        with open(arguments.plot, "w") as file:
            file.write(_drawn(arguments.plot, plan, points, best, f"{facts.model_id}: {plan.kind} sweep"))
        print(f"plot written to {arguments.plot}", file=sys.stderr)
    return 1 if plan.slo_ms is not None and best is None else 0


def _drawn(path: str, plan: sweep.Sweep, points, best, title: str) -> str:
    if path.endswith(".svg"):
        return sweep_plot.svg(plan.kind, points, plan.slo_ms, title)
    return sweep_plot.page(plan.kind, points, plan.slo_ms, title, sweep.table(plan, points, best))


async def _measured(arguments: argparse.Namespace, facts: ServerFacts, pace: serve.Pace, seed: int | None):
    progress = StartReport()
    load = load_from(argparse.Namespace(**(vars(arguments) | {"seed": seed})))
    total, counts = load.num_prompts, {"done": 0}

    def on_done(error: str | None) -> None:
        counts["done"] += 1
        progress.progress("requests", counts["done"], total)

    progress.progress("requests", 0, total)
    try:
        return await serve.run(_target(arguments), load, pace, _options(arguments), facts=facts, on_done=on_done)
    finally:
        progress.close()


async def _facts(arguments: argparse.Namespace) -> ServerFacts:
    facts = await ask(_target(arguments))
    if arguments.token_ids is not None:
        facts = dataclasses.replace(facts, token_ids=arguments.token_ids)
    return facts


def _is_refused(figures: Mapping[str, object], arguments: argparse.Namespace) -> bool:
    why = lag.bottleneck(figures, arguments.max_client_lag_ms)
    if why is not None:
        print(
            f"jserve bench serve: no report: {why}, so the figures would be the client's and not the server's;"
            " use more --num-client-processes, another machine, or --max-client-lag-ms",
            file=sys.stderr,
        )
    return why is not None


def _target(arguments: argparse.Namespace) -> Target:
    default = "127.0.0.1:50051" if arguments.backend == "jserve" else "http://127.0.0.1:8000"
    return Target(arguments.backend, arguments.address or default, arguments.model, **client_access(arguments))


def _pace(arguments: argparse.Namespace) -> serve.Pace:
    ramp = None
    if arguments.ramp_up_strategy:
        ramp = Ramp(arguments.ramp_up_strategy, arguments.ramp_up_start_rps, arguments.ramp_up_end_rps)
    return serve.Pace(arguments.request_rate, arguments.burstiness, ramp, arguments.max_concurrency)


def _options(arguments: argparse.Namespace) -> serve.Options:
    needed = SLO_PERCENTILES if arguments.sweep else ()
    return serve.Options(
        num_warmups=arguments.num_warmups,
        num_processes=arguments.num_client_processes,
        stall_timeout_s=arguments.stall_timeout_s,
        percentiles=tuple(dict.fromkeys((*arguments.metric_percentiles, *needed))),
        goodput=arguments.goodput,
    )


def _bad_usage(arguments: argparse.Namespace) -> str | None:
    ramp = (arguments.ramp_up_strategy, arguments.ramp_up_start_rps, arguments.ramp_up_end_rps)
    if any(ramp) and not all(ramp):
        return "--ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps go together"
    if all(ramp) and math.isfinite(arguments.request_rate):
        return "--request-rate has no meaning with --ramp-up-strategy"
    if arguments.sweep and arguments.sweep[1] is None and not arguments.slo:
        return f"--sweep {arguments.sweep[0]}:auto needs --slo"
    if arguments.slo and not arguments.sweep:
        return "--slo needs --sweep (for one run: --goodput)"
    if arguments.sweep and arguments.sweep[0] == "rate" and (all(ramp) or arguments.dataset_name == "trace"):
        return "--sweep rate sets the rate itself: no --ramp-up-strategy, no trace"
    if arguments.model is not None and arguments.backend == "jserve":
        return "--model has no meaning with --backend jserve: the server has one"
    return None


def _rate(text: str) -> float:
    return math.inf if text == "inf" else number(above=True)(text)


def _id_range(text: str) -> range:
    first, _, last = text.partition(":")
    try:
        if 0 <= int(first) < int(last):
            return range(int(first), int(last) + 1)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r}: expected two ids, such as 1000:29999")


def _sweep(text: str) -> tuple[str, tuple[float, ...] | None]:
    kind, _, points = text.partition(":")
    if kind not in sweep.KINDS or not points:
        raise argparse.ArgumentTypeError(f"{text!r}: expected rate:1,2,4, concurrency:1,8,32 or rate:auto")
    return kind, None if points == "auto" else number_list(points)


def _slo(text: str) -> dict[str, float]:
    return dict(sweep.SLOS[text]) if text in sweep.SLOS else target(text)


COMMAND = Command(
    usage="[--address HOST:PORT] [--max-concurrency N | --request-rate R] [flags]",
    summary="A load against a running server, from client processes of its own; warm-up is outside the figures.",
    add_arguments=add_arguments,
    run=run,
    epilog="""\
examples:
  jserve bench serve --max-concurrency 8 --num-prompts 64
  jserve bench serve --request-rate 4 --goodput ttft:500 tpot:100 --plot run.html
  jserve bench serve --dataset-name shared-prefix --shared-prefix-len 384 --random-input-len 128 --max-concurrency 8
  jserve bench serve --sweep rate:auto --slo mlperf-8b-server --plot sweep.html
  jserve bench serve --backend openai --address http://127.0.0.1:8000 --max-concurrency 8""",
)
