"""What a long prompt does to the streams that decode beside it: the engine of this machine, chunked against whole prefill.

    python -m tools.measure_stalls --model smollm2-135m --budgets 128 512 4224 [--streams 32] [--prompt-len 4096] [--json]

Each token budget is an engine of its own.  When every stream has its first token, the long prompt is sent; what counts are
the gaps between two tokens of the streams from then to the prompt's first token.  A budget of the prompt and a token for
each stream is whole prefill: everything in one step.  The same prompt comes --repeats times, with other tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass

import numpy as np

from jserve.config import Config
from jserve.local_engine import start_engine
from jserve.request import GenerateRequest, SamplingParams

STREAM_PROMPT = 32


@dataclass(frozen=True)
class Stalls:
    """Milliseconds, over all streams and repeats; `alone` is before the long prompt."""

    budget: int
    gaps: int
    median_alone_ms: float
    median_ms: float
    p99_ms: float
    max_ms: float
    prompt_ttft_ms: float


class _Quiet:
    def line(self, text: str) -> None: ...

    def progress(self, phase: str, done: int, total: int) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--budgets", type=int, nargs="+", default=[128, 512, 4224], help="max_num_batched_tokens of each engine")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt-len", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="a JSON object for each budget")
    options = parser.parse_args()
    for budget in options.budgets:
        stalls = asyncio.run(measure(options, budget))
        text = (
            f"budget {stalls.budget:5}: gap median {stalls.median_ms:7.1f} ms, P99 {stalls.p99_ms:8.1f} ms, "
            f"max {stalls.max_ms:8.1f} ms ({stalls.median_alone_ms:.1f} ms alone); "
            f"the prompt's first token after {stalls.prompt_ttft_ms:7.0f} ms"
        )
        print(json.dumps(asdict(stalls)) if options.json else text, flush=True)


async def measure(options: argparse.Namespace, budget: int) -> Stalls:
    config = Config().replace("model", path=options.model)
    config = config.replace("scheduler", max_num_seqs=options.streams + 1, max_num_batched_tokens=budget)
    engine = await start_engine(config.replace("kv", prefix_cache=False), _Quiet())
    draw = random.Random(options.seed)
    times: list[list[float]] = [[] for _ in range(options.streams)]
    streams = [asyncio.create_task(_stream(engine, draw, received)) for received in times]
    try:
        alone, beside, waits = [], [], []
        for _ in range(options.repeats):
            before = min(map(len, times))
            while min(map(len, times)) < before + 20:
                await asyncio.sleep(0.01)
            began = time.perf_counter()
            await _first_token(engine, draw, options.prompt_len)
            ended = time.perf_counter()
            waits.append(1000 * (ended - began))
            beside += _gaps(times, began, ended)
            alone += _gaps(times, 0.0, began) if not alone else []
    finally:
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await engine.close()
    return Stalls(
        budget, len(beside), statistics.median(alone[len(alone) // 2 :]), statistics.median(beside),
        float(np.percentile(beside, 99)), max(beside), statistics.median(waits),
    )  # fmt: skip


async def _stream(engine, draw: random.Random, received: list[float]) -> None:
    """One stream that decodes until it is cancelled; another follows where it comes to its end."""
    while True:
        request = GenerateRequest(
            prompt_token_ids=_tokens(draw, STREAM_PROMPT), sampling_params=SamplingParams(max_tokens=2000, ignore_eos=True)
        )
        async for _ in engine.generate(request):
            received.append(time.perf_counter())


async def _first_token(engine, draw: random.Random, length: int) -> None:
    request = GenerateRequest(prompt_token_ids=_tokens(draw, length), sampling_params=SamplingParams(max_tokens=1))
    async for _ in engine.generate(request):
        pass


def _gaps(times: list[list[float]], began: float, ended: float) -> list[float]:
    """Milliseconds between tokens that overlap [began, ended]."""
    return [
        1000 * (later - earlier)
        for received in times
        for earlier, later in zip(received, received[1:])
        if later > began and earlier < ended
    ]


def _tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(1000, 40000) for _ in range(count)]


if __name__ == "__main__":
    main()
