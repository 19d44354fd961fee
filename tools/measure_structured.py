"""What structured output costs a step: as many schemas as streams, with and without jump-ahead, against none.

    python -m tools.measure_structured --model smollm2-135m [--streams 32 1] [--tokens 40]

Prints the table of docs/sampling.md.  Each load runs once to warm up and once for the figures, all its requests at once.
Engines of two settings, one after the other.  Of steps with masks it says how long the host took to fill them, and in how
many the device was still computing the logits when they were done: there they cost nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

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
        prompt = f"Customer {number} writes: where is my parcel? As JSON: "
        made.append(GenerateRequest(prompt=prompt, sampling_params=params))
    return made


@dataclass
class MaskTimes:
    """Of the steps that had masks."""

    seconds: list[float] = field(default_factory=list)
    """Host work alone: the wait for the token before is not in it."""
    was_hidden: list[bool] = field(default_factory=list)
    """Whether the logits that the mask is for were still being computed when it was done."""

    def __str__(self) -> str:
        if not self.seconds:
            return "no masks"
        typical = sorted(self.seconds)[len(self.seconds) // 2]
        hidden = f"{sum(self.was_hidden)} of {len(self.seconds)} steps"
        return f"masks {1e3 * typical:.2f} ms, done before the logits in {hidden}"


@contextmanager
def watched_masks(engine: AsyncEngine) -> Iterator[MaskTimes]:
    """Looks at each step's masks as they are made."""
    runner, times, waited = engine._loop._runner, MaskTimes(), [0.0]
    programs, grammars = runner._programs, runner._grammars
    compute, fill = programs.logits, grammars.masks
    launched = []

    def logits(*arguments):
        launched[:] = [compute(*arguments)]
        return launched[0]

    def masks(plan, num_rows, token_in_flight):
        waited[0] = 0.0

        def token(row: int) -> int:
            began = time.perf_counter()
            token_id = token_in_flight(row)
            waited[0] += time.perf_counter() - began
            return token_id

        began = time.perf_counter()
        made = fill(plan, num_rows, token)
        if made.bits is not None:
            times.was_hidden.append(not launched[0].is_ready())
            times.seconds.append(time.perf_counter() - began - waited[0])
        return made

    programs.logits, grammars.masks = logits, masks
    try:
        yield times
    finally:
        programs.logits, grammars.masks = compute, fill


async def measure(engine: AsyncEngine, asked: list[GenerateRequest]) -> str:
    """A cell of the table."""
    await asyncio.gather(*(engine.generate_all(one) for one in asked))
    totals = engine._loop.totals
    steps, began = totals.num_steps, time.perf_counter()
    with watched_masks(engine) as masks:
        updates = await asyncio.gather(*(engine.generate_all(one) for one in asked))
    seconds, steps = time.perf_counter() - began, totals.num_steps - steps
    tokens = sum(update.usage.completion_tokens for update in updates)
    return f"{steps} steps, {1e3 * seconds / steps:.0f} ms a step, {tokens / seconds:.1f} tokens/s; {masks}"


class _Quiet:
    def line(self, text: str) -> None: ...

    def progress(self, phase: str, done: int, total: int) -> None: ...


LOADS = {
    "no schemas": (False, False),
    "schemas, no jump-ahead": (False, True),
    "schemas, jump-ahead": (True, True),
}
"""Row of the table: (jump-ahead, schemas)."""


async def run(options: argparse.Namespace) -> None:
    cells: dict[str, list[str]] = {name: [] for name in LOADS}
    for streams in options.streams:
        for jumps in (False, True):
            config = Config().replace("model", path=options.model)
            config = config.replace("scheduler", max_num_seqs=streams, jump_ahead=jumps)
            engine = await start_engine(config, _Quiet())
            try:
                for name, (_, structured) in ((n, load) for n, load in LOADS.items() if load[0] == jumps):
                    cells[name].append(await measure(engine, requests(streams, options.tokens, structured)))
            finally:
                await engine.close()
    print(f"|  | {' | '.join(f'{streams} streams' for streams in options.streams)} |")
    print("| --- " * (len(options.streams) + 1) + "|")
    for name, row in cells.items():
        print(f"| {name} | {' | '.join(row)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, nargs="+", default=[32, 1])
    parser.add_argument("--tokens", type=int, default=40)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
