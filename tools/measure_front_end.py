"""What gRPC and the server cost: the same load through `jserve serve` and on an engine without a server, in turns.

    python -m tools.measure_front_end [--streams 64] [--rounds 3] [--dtype float32] [--limit-percent 5] [--json]

Two processes, each with an engine of its own and the same settings, are started once; while one is measured the other
is paused.  Their order alternates from round to round, so that a machine that slows down favours neither.  The offline
side runs the bench's driver in the engine's process; the other side has its client on the same machine, which counts as
the front end's.  Exit code 1 where the median of the rounds' ratios is beyond the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from jserve.bench import throughput
from jserve.bench.load import RandomLoad
from jserve.bench.serve import Options, Pace, run
from jserve.bench.target import ask
from jserve.config import Config
from jserve.local_engine import start_engine
from tools.peers import servers

FIGURES = ("output_throughput", "median_ttft_ms", "median_tpot_ms", "padded_token_share", "num_steps")


def main() -> int:
    arguments = _arguments()
    if arguments.offline_child:
        return asyncio.run(_offline(arguments))
    rounds = asyncio.run(_rounds(arguments))
    answer = summary(rounds)
    if arguments.json:
        print(json.dumps(answer | {"rounds": rounds, "streams": arguments.streams, "dtype": arguments.dtype}))
    else:
        print(render(rounds, answer))
    return 0 if answer["lost_percent"] <= arguments.limit_percent else 1


def summary(rounds: list[dict[str, dict[str, float]]]) -> dict[str, float]:
    """Ratios of output tokens a second, served to offline, and what the middle one of them loses."""
    ratios = [one["served"]["output_throughput"] / one["offline"]["output_throughput"] for one in rounds]
    middle = statistics.median(ratios)
    return {"median_ratio": middle, "lost_percent": 100 * (1 - middle), "least": min(ratios), "most": max(ratios)}


def render(rounds: list[dict[str, dict[str, float]]], answer: dict[str, float]) -> str:
    head = "| round | offline tok/s | served tok/s | ratio | TPOT ms | TTFT ms | padded share | steps |"
    lines = [head, "|" + "---|" * 8]
    for number, one in enumerate(rounds, 1):
        offline, served = one["offline"], one["served"]
        rates = [side["output_throughput"] for side in (offline, served)]
        pairs = [f"{offline[name]:.0f}, {served[name]:.0f}" for name in ("median_tpot_ms", "median_ttft_ms")]
        padded = f"{offline['padded_token_share']:.1%}, {served['padded_token_share']:.1%}"
        steps = f"{offline['num_steps']}, {served['num_steps']}"
        cells = [number, f"{rates[0]:.1f}", f"{rates[1]:.1f}", f"{rates[1] / rates[0]:.3f}", *pairs, padded, steps]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([
        *lines, "",
        f"the front end takes {answer['lost_percent']:.1f}% of throughput: median ratio {answer['median_ratio']:.3f},"
        f" from {answer['least']:.3f} to {answer['most']:.3f}",
    ])


async def _rounds(arguments: argparse.Namespace) -> list[dict[str, dict[str, float]]]:
    """A first round of one wave of requests warms both up and is not counted."""
    folder = Path(tempfile.mkdtemp(prefix="front-end-"))
    _say(f"output of both in {folder}")
    flags = ["--kv.memory_bytes", str(arguments.kv_memory_bytes)]
    launch = servers.jserve(arguments.model, arguments.dtype, arguments.streams, arguments.context, flags)
    found = []
    async with servers.running(launch, folder / "served.log", arguments.start_timeout_s) as served:
        facts = await ask(launch.target)
        served.pause()
        with _child(arguments, folder / "offline.log") as offline:
            for number in range(arguments.rounds + 1):
                load = _load(arguments, number)
                pair = {}
                for side in ("offline", "served") if number % 2 else ("served", "offline"):
                    if side == "served":
                        served.resume()
                        options = Options(num_warmups=0, percentiles=(99,))
                        figures, _ = await run(
                            launch.target, load, Pace(max_concurrency=arguments.streams), options, facts=facts
                        )
                        served.pause()
                    else:
                        figures = await asyncio.to_thread(offline, number)
                    if figures["failed"]:
                        raise servers.NotReady(f"{side}: {figures['failed']} requests failed: {figures['errors']}")
                    pair[side] = {name: figures[name] for name in FIGURES}
                    _say(f"round {number}, {side}: {figures['output_throughput']:.1f} tok/s")
                if number:
                    found.append(pair)
    return found


@contextlib.contextmanager
def _child(arguments: argparse.Namespace, log: Path):
    """Gives a function that runs a round's load in the process of the offline engine, which is paused otherwise."""
    command = [sys.executable, "-m", "tools.measure_front_end", "--offline-child", *sys.argv[1:]]
    with log.open("wb") as output:
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=output, text=True, start_new_session=True)

    def answer() -> dict[str, object]:
        line = process.stdout.readline()
        if not line:
            raise servers.NotReady(f"the offline engine ended with status {process.wait()}; its output is in {log}")
        return json.loads(line)

    def measure(number: int) -> dict[str, object]:
        process.send_signal(signal.SIGCONT)
        process.stdin.write(f"{number}\n")
        process.stdin.flush()
        try:
            return answer()
        finally:
            process.send_signal(signal.SIGSTOP)

    try:
        answer()
        process.send_signal(signal.SIGSTOP)
        yield measure
    finally:
        process.kill()
        process.wait()


async def _offline(arguments: argparse.Namespace) -> int:
    """In the child: an engine, a round for each number that stdin names, figures on stdout."""
    config = Config().replace("model", path=arguments.model, dtype=arguments.dtype, context_length=arguments.context)
    config = config.replace("scheduler", max_num_seqs=arguments.streams)
    config = config.replace("kv", memory_bytes=arguments.kv_memory_bytes)
    engine = await start_engine(config, _Quiet())
    print("{}", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        figures, _ = await throughput.run(engine, _load(arguments, int(line)), concurrency=arguments.streams)
        print(json.dumps(figures), flush=True)
    await engine.close()
    return 0


class _Quiet:
    def line(self, text: str) -> None: ...

    def progress(self, phase: str, done: int, total: int) -> None: ...


def _load(arguments: argparse.Namespace, number: int) -> RandomLoad:
    count = arguments.num_prompts if number else arguments.streams
    return RandomLoad(count, arguments.input_len, arguments.output_len, seed=arguments.seed + number)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="[%(default)s]")
    parser.add_argument("--dtype", default="float32", help="[%(default)s]")
    parser.add_argument("--streams", type=int, default=64, metavar="N", help="requests open at once [%(default)s]")
    parser.add_argument("--num-prompts", type=int, default=128, metavar="N", help="requests a round [%(default)s]")
    parser.add_argument("--input-len", type=int, default=128, metavar="N", help="[%(default)s]")
    parser.add_argument("--output-len", type=int, default=64, metavar="N", help="[%(default)s]")
    parser.add_argument("--context", type=int, default=1024, metavar="N", help="of both engines [%(default)s]")
    parser.add_argument("--kv-memory-bytes", type=int, default=2**30, metavar="N", help="of each engine [%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="[%(default)s]")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the prompts [%(default)s]")
    parser.add_argument("--limit-percent", type=float, default=5.0, metavar="P", help="exit code 1 above [%(default)g]")
    parser.add_argument("--start-timeout-s", type=float, default=400.0, metavar="S", help="[%(default)g]")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--offline-child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: both engines are stopped on the way out
    sys.exit(main())
