"""jserve beside vLLM, llama.cpp and HF transformers on this machine: the same load on each, in turn, as ratios.

    python -m tools.compare_peers --only vllm --dtype float32 --max-concurrency 8
    python -m tools.compare_peers --setup-only

Both servers are started once and measured alternately, the other one paused.  Environments and the model are made on
first use in --folder.  Rows go into docs/benchmarks.md and the JSON beside it, pair by pair, so that the whole can be
made in pieces.  Exit code 1 where float32 tokens part and rounding does not explain it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from jserve.bench import report
from jserve.bench.load import Load, RandomLoad, SharedPrefixLoad
from jserve.bench.report import RequestRecord
from jserve.bench.serve import Options, Pace, run
from jserve.bench.target import ANY_VOCABULARY, ServerFacts
from jserve.config import Config
from jserve.weights.convert import convert
from jserve.weights.fetch import with_model_on_disk
from tools.peers import agreement, environments, servers, table
from tools.peers.servers import NAME, Launch, Running

PEERS = ("vllm", "llama.cpp", "transformers")
THEIR_DTYPE = {"float32": "float32", "int8": "bfloat16", "bfloat16": "bfloat16"}
"""What a peer runs beside ours: its own dtype class; int8 is our fast path on CPU, bfloat16 is theirs."""
PROMPTS_AT = {1: 6, 8: 24, 32: 64, 64: 96}
"""Requests of a run by concurrency: about a minute on two cores at most."""
PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"


@dataclass(frozen=True)
class Measured:
    figures: dict[str, object]
    records: list[RequestRecord]


def main() -> int:
    arguments = _arguments()
    try:
        return asyncio.run(asyncio.wait_for(_compare(arguments), arguments.time_limit_s))
    except TimeoutError:
        print(f"stopped: --time-limit-s {arguments.time_limit_s:g} is over; rows so far are kept", file=sys.stderr)
    except servers.NotReady as error:
        print(error, file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    return 1


async def _compare(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    gguf = Path(with_model_on_disk(Config().replace("model", path=arguments.model), _say).model.path)
    model = folder / "model"
    if not model.exists():
        convert(gguf, model, "hf", dtype="float32")  # dequantised, so that all engines compute the same model
    if arguments.setup_only:
        for name in arguments.only:
            _say(f"{name}: {_set_up(name, folder)}")
        return 0
    rows: list[table.Row] = []
    for name in arguments.only:
        for dtype in arguments.dtype:
            if name == "transformers":
                rows += await _beside_transformers(arguments, folder, gguf, model, dtype)
            else:
                rows += await _beside_server(arguments, folder, gguf, model, name, dtype)
    unexplained = [row for row in rows if row.unexplained_nats is not None]
    for row in unexplained:
        _say(f"{row.peer} at {row.concurrency}: tokens part where our model is sure by {row.unexplained_nats:.2f} nats")
    return 1 if unexplained else 0


def _set_up(name: str, folder: Path) -> Path:
    make = {
        "vllm": environments.vllm, "llama.cpp": environments.llama_server, "transformers": environments.transformers,
    }
    return make[name](folder)


async def _beside_server(
    arguments: argparse.Namespace, folder: Path, gguf: Path, model: Path, name: str, dtype: str
) -> list[table.Row]:
    rows = []
    most, context = max(arguments.max_concurrency), arguments.context
    if name == "vllm":
        theirs = servers.vllm(folder, model, THEIR_DTYPE[dtype], most, context)
    else:
        theirs = servers.llama_cpp(folder, gguf, most, context)
    async with _ours(arguments, folder, gguf, model, dtype, most) as us:
        us.pause()
        async with _started(theirs, folder, arguments) as them:
            them.pause()
            for concurrency in arguments.max_concurrency:
                runs: dict[str, list[Measured]] = {"ours": [], "theirs": []}
                for number in range(arguments.rounds):
                    load = _load(arguments, concurrency, seed=1000 * concurrency + number)
                    for side, one in (("ours", us), ("theirs", them)):
                        one.resume()
                        runs[side].append(await _measure(one.launch, load, concurrency, arguments))
                        one.pause()
                        rate = runs[side][-1].figures["output_throughput"]
                        _say(f"{one.launch.name} at {concurrency}: {rate:.1f} tok/s")
                us.resume()
                agreed = await _agreement(us, load, runs)
                us.pause()
                rows.append(_keep(arguments, us, theirs.name, them.ready_s, theirs.version, concurrency, runs, agreed))
    return rows


async def _beside_transformers(
    arguments: argparse.Namespace, folder: Path, gguf: Path, model: Path, dtype: str
) -> list[table.Row]:
    rows = []
    python = environments.transformers(folder)
    async with _ours(arguments, folder, gguf, model, dtype, max(arguments.max_concurrency)) as us:
        for concurrency in arguments.max_concurrency:
            runs: dict[str, list[Measured]] = {"ours": [], "theirs": []}
            for number in range(arguments.rounds):
                load = _load(arguments, concurrency, seed=1000 * concurrency + number)
                us.resume()
                runs["ours"].append(await _measure(us.launch, load, concurrency, arguments))
                us.pause()
                theirs, ready_s, version = await asyncio.to_thread(
                    _transformers, python, model, THEIR_DTYPE[dtype], load, concurrency
                )
                runs["theirs"].append(theirs)
            us.resume()
            agreed = await _agreement(us, load, runs)
            name = f"transformers {THEIR_DTYPE[dtype]} (static batches)"
            version = f"transformers {version}"
            rows.append(_keep(arguments, us, name, ready_s, version, concurrency, runs, agreed))
    return rows


@contextlib.asynccontextmanager
async def _ours(arguments: argparse.Namespace, folder: Path, gguf: Path, model: Path, dtype: str, most: int):
    """jserve over the same numbers as vLLM and transformers read: from the GGUF as its users do, or from their folder."""
    flags = [*arguments.jserve_flags, *(["--quantize", "int8"] if dtype == "int8" else [])]
    from_gguf = arguments.our_weights == "gguf"
    launch = servers.jserve(str(gguf if from_gguf else model), dtype, most, arguments.context, flags)
    if not from_gguf:
        launch = replace(launch, name=f"{launch.name} from the folder")
    async with _started(launch, folder, arguments) as one:
        yield one


def _started(launch: Launch, folder: Path, arguments: argparse.Namespace):
    log = folder / "logs" / f"{launch.name.replace(' ', '-')}.log"
    _say(f"starting {launch.name} ({launch.version}), output in {log}")
    return servers.running(launch, log, arguments.start_timeout_s)


async def _measure(launch: Launch, load: Load, concurrency: int, arguments: argparse.Namespace) -> Measured:
    facts = ServerFacts(NAME, arguments.context, ANY_VOCABULARY, {})
    options = Options(num_warmups=min(concurrency, 4), num_processes=1, percentiles=(50, 99))
    figures, records = await run(launch.target, load, Pace(max_concurrency=concurrency), options, facts=facts)
    if figures["failed"]:
        raise servers.NotReady(f"{launch.name}: {figures['failed']} requests failed: {figures['errors']}")
    return Measured(figures, records)


def _transformers(python: Path, model: Path, dtype: str, load: Load, concurrency: int):
    """(what it measured, seconds to load, version): in its own process, as it has no server."""
    requests = [turn for one in load.conversations(ANY_VOCABULARY) for turn in one.turns]
    job = {
        "model": str(model), "dtype": dtype, "concurrency": concurrency, "threads": os.cpu_count(),
        "prompts": [list(one.prompt_token_ids) for one in requests],
        "warm_ups": [list(one.prompt_token_ids) for one in load.warm_ups(concurrency, ANY_VOCABULARY)],
        "output_len": requests[0].sampling_params.max_tokens,
    }
    script = Path(__file__).parent / "peers" / "transformers_client.py"
    done = subprocess.run(
        [str(python), str(script)], input=json.dumps(job), capture_output=True, text=True, timeout=1800
    )
    if done.returncode:
        raise servers.NotReady(f"transformers: {done.stderr.splitlines()[-1]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    records = [
        RequestRecord(
            len(prompt), one["start"], tuple(map(tuple, one["arrivals"])), one["arrivals"][-1][0],
            token_ids=tuple(one["token_ids"]),
        )
        for prompt, one in zip(job["prompts"], answer["records"])
    ]
    return Measured(report.summarize(records, (50, 99)), records), answer["ready_s"], answer["version"]


async def _agreement(us: Running, load: Load, runs: dict[str, list[Measured]]) -> dict[str, object] | None:
    """Of the last round, whose load this is."""
    ours, theirs = runs["ours"][-1].records, runs["theirs"][-1].records
    found = agreement.compare(ours, theirs)
    if found is None:
        return None
    prompts = [turn.prompt_token_ids for one in load.conversations(ANY_VOCABULARY) for turn in one.turns]
    margins = await agreement.margins(us.launch.target.address, prompts, ours, theirs)
    return asdict(replace(found, margins=margins))


def _keep(
    arguments: argparse.Namespace, us: Running, peer: str, their_ready_s: float, version: str, concurrency: int,
    runs: dict[str, list[Measured]], agreed: dict[str, object] | None,
) -> table.Row:
    def median(side: str, key: str) -> float | None:
        values = [one.figures[key] for one in runs[side] if one.figures[key] is not None]
        return statistics.median(values) if values else None

    row = table.Row(
        peer=peer, our_name=us.launch.name, load=_load_name(arguments), concurrency=concurrency,
        ours=median("ours", "output_throughput"), theirs=median("theirs", "output_throughput"),
        our_ttft_ms=median("ours", "median_ttft_ms"), their_ttft_ms=median("theirs", "median_ttft_ms"),
        our_tpot_ms=median("ours", "median_tpot_ms"), their_tpot_ms=median("theirs", "median_tpot_ms"),
        our_ready_s=us.ready_s, their_ready_s=their_ready_s, num_rounds=arguments.rounds,
        num_prompts=runs["ours"][0].figures["completed"], agreement=agreed,
        versions=f"{version}, jserve {us.launch.version}, jax {environments.own_version('jax')}",
        machine=f"{platform.machine()}, {os.cpu_count()} virtual cores, {_processor()}",
        date=time.strftime("%Y-%m-%d"),
    )
    table.write(arguments.page, table.merge(table.read(arguments.page.with_suffix(".json")), [row]))
    _say(f"{row.our_name} against {peer} at {concurrency}: {row.ours / row.theirs:.2f}x; kept in {arguments.page}")
    return row


def _load(arguments: argparse.Namespace, concurrency: int, seed: int) -> Load:
    """The same for both sides of a round, another in each round."""
    nearest = min(PROMPTS_AT, key=lambda known: abs(known - concurrency))
    count = arguments.num_prompts or max(PROMPTS_AT[nearest], concurrency)
    own = RandomLoad(count, arguments.input_len, arguments.output_len, seed=seed)
    if not arguments.shared_prefix_len:
        return own
    return SharedPrefixLoad(own, num_groups=1, prefix_len=arguments.shared_prefix_len)


def _load_name(arguments: argparse.Namespace) -> str:
    shared = f"{arguments.shared_prefix_len} shared + " if arguments.shared_prefix_len else ""
    return f"{shared}{arguments.input_len} in, {arguments.output_len} out"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS), help="[all]")
    parser.add_argument("--dtype", nargs="+", choices=THEIR_DTYPE, default=["float32"], help="ours [float32]")
    parser.add_argument("--max-concurrency", nargs="+", type=int, default=[1, 8, 32, 64], help="[1 8 32 64]")
    parser.add_argument("--rounds", type=int, default=1, help="times that the engines take turns [%(default)s]")
    parser.add_argument("--num-prompts", type=int, metavar="N", help="requests a run [by concurrency]")
    parser.add_argument("--input-len", type=int, default=128, metavar="N", help="[%(default)s]")
    parser.add_argument("--output-len", type=int, default=64, metavar="N", help="[%(default)s]")
    parser.add_argument("--shared-prefix-len", type=int, default=0, help="shared tokens before them [none]")
    parser.add_argument("--context", type=int, default=1024, metavar="N", help="of both servers [%(default)s]")
    parser.add_argument(
        "--our-weights", choices=("gguf", "folder"), default="gguf",
        help="what jserve reads; the folder holds the GGUF's numbers as float32 [%(default)s]",
    )
    parser.add_argument("--model", default="smollm2-135m", help="a GGUF that jserve reads [%(default)s]")
    parser.add_argument("--jserve-flags", nargs=argparse.REMAINDER, default=[], help="more flags of jserve serve, last")
    parser.add_argument("--folder", default="~/.cache/jserve/peers", help="environments, model, logs [%(default)s]")
    parser.add_argument("--page", type=Path, default=PAGE, help="[docs/benchmarks.md]")
    parser.add_argument("--start-timeout-s", type=float, default=400.0, metavar="S", help="[%(default)g]")
    parser.add_argument("--time-limit-s", type=float, default=3600.0, metavar="S", help="of all [%(default)g]")
    parser.add_argument("--setup-only", action="store_true", help="make environments and model, measure nothing")
    return parser.parse_args()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the servers are stopped on the way out
    sys.exit(main())
