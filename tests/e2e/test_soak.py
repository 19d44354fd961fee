"""A server for half an hour under everything at once: mixed load over both transports, clients that leave, bad requests,
and two restarts in the middle of it.  Memory stays flat, nothing is owned when it is idle, nothing is compiled.

`make soak PYTEST_ARGS="-k test_soak"`; JSERVE_SOAK_MINUTES says how long (tests/conftest.py).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import random
import signal
import time
from types import SimpleNamespace

import pytest

from jserve.request import Code, EarlyStopping, GenerateRequest, RequestError, SamplingParams
from jserve.server.async_client import AsyncClient
from tests.support.http_server import events, post
from tests.support.served import Served, growth_of, served
from tests.support.tiny_models import random_gguf

NUM_CALLERS = 16
EVERY_S = 2.0
"""Between two looks at the server's memory."""
WARM_SHARE = 0.3
"""Of a phase, before memory counts: caches fill."""
MAX_GROWTH_BYTES = 16 * 2**20
RESTART_CODES = {Code.UNAVAILABLE, Code.CANCELLED}

BAD = [
    SamplingParams(temperature=-1), SamplingParams(top_p=0.0), SamplingParams(max_tokens=-1), SamplingParams(n=0),
    SamplingParams(logprobs=1000), SamplingParams(beam_width=2, temperature=1.0), SamplingParams(regex="("),
    SamplingParams(max_tokens=1, truncate_prompt_tokens=0),
]  # fmt: skip


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_soak_of_mixed_load_with_restarts(tmp_path, request):
    minutes = request.config.getoption("--soak-minutes")
    model = random_gguf(tmp_path / "model.gguf")
    flags = [
        "--model", str(model), "--port", "0", "--http-port", "0", "--kv.num_blocks", "129", "--kv.block_size", "16",
        "--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--cache-dir", str(tmp_path / "cache"),
    ]  # fmt: skip
    done: collections.Counter[str] = collections.Counter()
    print(f"\nsoak: 3 phases of {minutes / 3:.1f} minutes, {NUM_CALLERS} callers")
    for phase in range(3):
        with served(flags, tmp_path / f"log{phase}") as server:
            samples = asyncio.run(_phase(server, 20 * minutes, phase, done, restart=phase < 2))
            if phase == 2:
                server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(60) == 0
        first, last = growth_of(samples, WARM_SHARE)
        print(f"soak: phase {phase + 1}: {first / 2**20:.1f} MiB early, {last / 2**20:.1f} MiB late; so far {dict(done)}")
        assert last - first < MAX_GROWTH_BYTES
    assert all(done[what] for what in ("grpc", "http", "streamed", "left", "refused", "beams")), done


async def _phase(
    server: Served, seconds: float, phase: int, done: collections.Counter, restart: bool
) -> list[int]:
    """Load for `seconds`; then either SIGTERM in the middle of it, or quiet and a look at the books."""
    samples: list[int] = []
    stopping = asyncio.Event()
    async with AsyncClient(server.address) as client:

        async def watch() -> None:
            while not stopping.is_set() and (num_bytes := server.resident_bytes()):  # 0: it has ended
                samples.append(num_bytes)
                await asyncio.sleep(EVERY_S)

        callers = [
            asyncio.create_task(_caller(server, client, random.Random(100 * phase + number), stopping, done))
            for number in range(NUM_CALLERS)
        ]
        watching = asyncio.create_task(watch())
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await asyncio.sleep(min(0.5, max(0.0, end - time.monotonic())))
            for task in callers:
                if task.done():
                    task.result()  # raises what went wrong
        if restart:
            loads = await client.loads()
            assert loads.compiles_after_ready == 0 and loads.requests_failed == 0
            server.process.send_signal(signal.SIGTERM)  # drains: what runs finishes, new calls are UNAVAILABLE
            await asyncio.to_thread(server.process.wait, 60)
        stopping.set()
        await asyncio.gather(*callers, watching)
        if not restart:
            await _is_idle(client)
    return samples


async def _is_idle(client: AsyncClient) -> None:
    for _ in range(100):
        loads = await client.loads()
        if (loads.num_running, loads.num_waiting, loads.kv_usage, loads.num_open_streams) == (0, 0, 0, 0):
            break
        await asyncio.sleep(0.1)
    assert (loads.num_running, loads.num_waiting, loads.kv_usage, loads.num_open_streams) == (0, 0, 0, 0)
    assert loads.compiles_after_ready == 0 and loads.requests_failed == 0
    assert await client.check_integrity() == []


async def _caller(
    server: Served, client: AsyncClient, draw: random.Random, stopping: asyncio.Event, done: collections.Counter
) -> None:
    """One request after another, each of a drawn kind, until the phase ends.  Anything unexpected is raised."""
    kinds = [(_whole, 4), (_streamed, 4), (_over_http, 3), (_leaves, 2), (_refused, 1)]
    while not stopping.is_set():
        [kind] = draw.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])
        try:
            await kind(server, client, draw, done)
        except RequestError as error:
            if error.code not in RESTART_CODES:
                raise
            await asyncio.sleep(0.05)
        except OSError:  # HTTP while the server goes
            await asyncio.sleep(0.05)


def _request(draw: random.Random, done: collections.Counter) -> GenerateRequest:
    prompt = [draw.randrange(1, 480) for _ in range(draw.choice((1, 5, 40, 120)))]
    if draw.random() < 0.5:  # half of them share a prefix
        prompt = [*range(100, 132), *prompt][:150]
    params = SamplingParams(max_tokens=draw.randint(1, 40), ignore_eos=draw.random() < 0.5)
    kind = draw.randrange(8)
    if kind == 0:
        done["beams"] += 1
        params = SamplingParams(max_tokens=8, beam_width=draw.choice((2, 3)), early_stopping=EarlyStopping.HEURISTIC)
    elif kind == 1:
        params = SamplingParams(max_tokens=12, n=3, seed=draw.randrange(100), temperature=0.8, top_p=0.9)
    elif kind == 2:
        params = SamplingParams(max_tokens=20, repetition_penalty=1.2, presence_penalty=0.5, stop=["e", "the"])
    elif kind == 3:
        params = SamplingParams(max_tokens=4, logprobs=5, prompt_logprobs=2, temperature=0)
    elif kind == 4:
        params = SamplingParams(max_tokens=10, regex="[ab]{1,5}")
    return GenerateRequest(prompt_token_ids=prompt, sampling_params=params, priority=draw.randrange(3))


async def _whole(server: Served, client: AsyncClient, draw: random.Random, done: collections.Counter) -> None:
    result = await client.generate_unary(_request(draw, done))
    assert result.outputs and result.usage is not None
    done["grpc"] += 1


async def _streamed(server: Served, client: AsyncClient, draw: random.Random, done: collections.Counter) -> None:
    last = None
    async for last in client.generate(_request(draw, done)):
        if draw.random() < 0.02:
            await asyncio.sleep(0.2)  # a slow reader
    assert last is not None and last.usage is not None
    done["streamed"] += 1


async def _over_http(server: Served, client: AsyncClient, draw: random.Random, done: collections.Counter) -> None:
    stream = draw.random() < 0.5
    body = {"prompt": [draw.randrange(1, 480) for _ in range(30)], "max_tokens": 20, "stream": stream}
    answer = await post(SimpleNamespace(http_url=server.http_url), "/v1/completions", body)
    if answer.status == 503:
        return
    assert answer.status == 200, answer.body[:300]
    assert events(answer)[-1] == "[DONE]" if stream else answer.json["usage"]["completion_tokens"] > 0
    done["http"] += 1


async def _leaves(server: Served, client: AsyncClient, draw: random.Random, done: collections.Counter) -> None:
    """A client that goes away in the middle, by cancelling or by closing its stream."""
    stream = client.generate(_request(draw, done))
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(draw.random() * 0.2)
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError, RequestError, StopAsyncIteration):
        await reading
    await stream.aclose()
    done["left"] += 1


async def _refused(server: Served, client: AsyncClient, draw: random.Random, done: collections.Counter) -> None:
    bad = GenerateRequest(prompt_token_ids=[1, 2], sampling_params=draw.choice(BAD))
    if draw.random() < 0.2:  # no such token
        bad = GenerateRequest(prompt_token_ids=[10**6], sampling_params=SamplingParams(max_tokens=1))
    try:
        await client.generate_unary(bad)
    except RequestError as error:
        if error.code in RESTART_CODES:
            raise
        assert error.code is Code.INVALID_ARGUMENT, error
        done["refused"] += 1
    else:
        raise AssertionError(f"served: {bad}")
