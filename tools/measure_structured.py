"""What structured output costs a step: as many schemas as streams, with and without jump-ahead, against none.

    python -m tools.measure_structured --model smollm2-135m [--streams 32] [--tokens 40]

Each load runs once to warm up and once for the figures, all its requests at once.  Engines of two settings, one after
the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

from jserve.config import Config
from jserve.engine.async_engine import AsyncEngine
from jserve.local_engine import start_engine
from jserve.request import GenerateRequest, SamplingParams


def schema(number: int) -> str:
    """Two values of few spellings and one free text; no two numbers have the same."""
    properties = {
        f"customer_number_{number}": {"type": "integer", "minimum": 1000, "maximum": 9999},
        "delivery_status": {"enum": ["delivered", "on its way", f"returned to depot {number}"]},
        "short_summary": {"type": "string", "maxLength": 400},
    }
    return json.dumps({"type": "object", "properties": properties, "required": list(properties)})


def requests(count: int, num_tokens: int, structured: bool) -> list[GenerateRequest]:
    made = []
    for number in range(count):
        fields = {"json_schema": schema(number)} if structured else {"ignore_eos": True}
        params = SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=number, **fields)
        made.append(GenerateRequest(prompt=f"Customer {number} writes: where is my parcel? As JSON: ", sampling_params=params))
    return made


async def measure(engine: AsyncEngine, asked: list[GenerateRequest]) -> str:
    """A row of the table."""
    await asyncio.gather(*(engine.generate_all(one) for one in asked))
    totals = engine._loop.totals
    steps, began = totals.num_steps, time.perf_counter()
    updates = await asyncio.gather(*(engine.generate_all(one) for one in asked))
    seconds, steps = time.perf_counter() - began, totals.num_steps - steps
    tokens = sum(update.usage.completion_tokens for update in updates)
    return f"{steps} steps, {1e3 * seconds / steps:.1f} ms a step, {tokens} tokens, {tokens / seconds:.1f} tokens/s"


class _Quiet:
    def line(self, text: str) -> None: ...

    def progress(self, phase: str, done: int, total: int) -> None: ...


async def run(options: argparse.Namespace) -> None:
    for jumps in (False, True):
        config = Config().replace("model", path=options.model)
        config = config.replace("scheduler", max_num_seqs=options.streams, jump_ahead=jumps)
        engine = await start_engine(config, _Quiet())
        try:
            for structured in (False, True):
                row = await measure(engine, requests(options.streams, options.tokens, structured))
                print(f"jump_ahead={jumps} schemas={structured}: {row}", flush=True)
        finally:
            await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=40)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
