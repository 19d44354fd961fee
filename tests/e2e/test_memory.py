"""A server under load for a quarter of an hour: its memory stays flat, nothing is compiled, its books are in order.

`make soak PYTEST_ARGS="-k memory --soak-minutes 120"`, or JSERVE_SOAK_MINUTES=120, runs longer.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time

import pytest

from jserve.bench.driver import Conversation, drive
from jserve.bench.load import RandomLoad
from jserve.bench.target import Target, stream_of
from jserve.server.async_client import AsyncClient
from tests.support.served import Served, growth_of, served
from tests.support.tiny_models import random_gguf

NUM_STREAMS = 32
EVERY_S = 5.0
"""Between two looks at the server's memory."""
WARM_SHARE = 0.2
"""Of the time, before memory counts: caches fill."""
MAX_GROWTH_BYTES = 16 * 2**20


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_memory_is_flat_under_load(tmp_path, request):
    minutes = request.config.getoption("--soak-minutes")
    model = random_gguf(tmp_path / "model.gguf")
    flags = [
        "--model", str(model), "--port", "0", "--kv.num_blocks", "129", "--kv.block_size", "16", "--max-num-seqs", "16",
        "--max-num-batched-tokens", "64", "--cache-dir", str(tmp_path / "cache"),
    ]
    with served(flags, tmp_path / "log") as server:
        samples = asyncio.run(_under_load(server, 60 * minutes))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    first, last = growth_of(samples, WARM_SHARE)
    print(f"\nmemory: {first / 2**20:.1f} MiB early, {last / 2**20:.1f} MiB late, {len(samples)} samples")
    assert last - first < MAX_GROWTH_BYTES


async def _under_load(server: Served, seconds: float) -> list[int]:
    end, samples = time.monotonic() + seconds, []

    async def watch() -> None:
        while True:
            samples.append(server.resident_bytes())
            await asyncio.sleep(EVERY_S)

    async def leave_now_and_then(stream) -> None:
        """Clients that go away in the middle."""
        draw = random.Random(7)
        while time.monotonic() < end:
            (one,) = RandomLoad(1, 40, 60, seed=draw.getrandbits(30)).requests(range(1, 480))
            reading = asyncio.ensure_future(anext(aiter(stream(one))))
            await asyncio.sleep(draw.random() * 0.3)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    watching = asyncio.ensure_future(watch())
    async with stream_of(Target("jserve", server.address)) as stream, AsyncClient(server.address) as client:
        leaving = asyncio.ensure_future(leave_now_and_then(stream))
        number = 0
        while time.monotonic() < end:
            load = RandomLoad(4 * NUM_STREAMS, 40, 30, range_ratio=0.9, seed=number)
            outcome = await drive(stream, [Conversation((one,)) for one in load.requests(range(1, 480))],
                                  concurrency=NUM_STREAMS)
            assert not [record.error for record in outcome.records if record.error], outcome.stopped
            number += 1
        await leaving
        watching.cancel()
        await asyncio.sleep(1.0)
        loads = await client.loads()
        assert await client.check_integrity() == []
    assert (loads.num_running, loads.num_waiting, loads.kv_usage, loads.num_open_streams) == (0, 0, 0, 0)
    assert loads.compiles_after_ready == 0 and loads.requests_failed == 0
    return samples
