"""`bench latency`: one stream at a time, so that nothing waits for anything but the model; what a single user feels."""

from __future__ import annotations

from jserve.bench import throughput
from jserve.bench.load import Load
from jserve.bench.report import RequestRecord

PERCENTILES = (10, 25, 50, 75, 90, 99)


async def run(engine, load: Load, **options) -> tuple[dict[str, object], list[RequestRecord]]:
    """Report and records of `load.num_prompts` requests, one after the other; options as in `throughput.run`."""
    return await throughput.run(engine, load, mode="latency", concurrency=1, **options)
