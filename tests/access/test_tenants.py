"""Limits of tenants: running, waiting, tokens a minute."""

import asyncio
import contextlib

import pytest

from jserve.access.auth_file import Limits
from jserve.access.tenants import Tenants, TokenBucket
from jserve.request import Code, GenerateRequest, GenerateUpdate, OutputDelta, RequestError, Usage

SHORT = GenerateRequest(prompt_token_ids=[1])


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def tenants(clock=None, **limits) -> Tenants:
    return Tenants({name: Limits(**values) for name, values in limits.items()}.__getitem__, clock or Clock())


async def hold(stack, tenants, name="red", request=SHORT):
    return await stack.enter_async_context(tenants.turn(name, request, most_running=4))


async def refused(tenants, name="red", request=SHORT) -> RequestError:
    with pytest.raises(RequestError) as caught:
        async with tenants.turn(name, request, most_running=4):
            pass
    assert caught.value.code is Code.RESOURCE_EXHAUSTED and caught.value.retry_after_s > 0
    return caught.value


async def test_who_is_nobody_has_no_limits():
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(100):
            await hold(stack, tenants(), None)


async def test_one_more_than_may_run_waits_its_turn_in_order():
    limited, order = tenants(red={"max_running": 2}, blue={"max_running": 1}), []

    async def one(number):
        async with limited.turn("red", SHORT, 4):
            order.append(number)
            await asyncio.sleep(0.002)

    async with contextlib.AsyncExitStack() as stack:
        await hold(stack, limited, "blue")
        first, second = await hold(stack, limited), await hold(stack, limited)
        waiting = [asyncio.create_task(one(number)) for number in range(5)]
        await asyncio.sleep(0.01)
        assert first and second and order == [] and limited.num_queued == 5
    await asyncio.gather(*waiting)
    assert order == list(range(5)) and limited.num_queued == 0 and not limited._tenants


async def test_the_queue_has_an_end():
    limited = tenants(red={"max_running": 1, "max_waiting": 1})
    async with contextlib.AsyncExitStack() as stack:
        await hold(stack, limited)
        waiting = asyncio.create_task(refusable(limited))
        await asyncio.sleep(0)
        error = await refused(limited)
        assert "max_running = 1 and max_waiting = 1" in error.message and "'red'" in error.message
    assert await waiting == "ran"


async def test_max_waiting_alone_counts_from_what_the_engine_runs_at_once():
    limited = tenants(red={"max_waiting": 0})
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(4):
            await hold(stack, limited)
        await refused(limited)
    async with limited.turn("red", SHORT, 4):
        pass


@pytest.mark.parametrize("when", ["while it waits", "when it was just let in"])
async def test_a_waiting_request_that_is_given_up_leaves_no_hole(when):
    limited = tenants(red={"max_running": 1})
    async with contextlib.AsyncExitStack() as stack:
        await hold(stack, limited)
        given_up, next_one = (asyncio.create_task(refusable(limited)) for _ in range(2))
        await asyncio.sleep(0)
        if when == "while it waits":
            given_up.cancel()
            await asyncio.sleep(0)
    given_up.cancel()
    assert await asyncio.wait_for(next_one, 1) == "ran"
    assert not limited._tenants


async def refusable(limited) -> str:
    async with limited.turn("red", SHORT, 4):
        return "ran"


def outputs(num_tokens: int, usage: Usage | None = None) -> GenerateUpdate:
    return GenerateUpdate("r", [OutputDelta(0, "", [5] * num_tokens)], usage=usage)


async def test_tokens_a_minute_come_back_with_time():
    clock = Clock()
    limited = tenants(clock, red={"tokens_per_minute": 60}, blue={"tokens_per_minute": 60})
    async with limited.turn("red", GenerateRequest(prompt_token_ids=[1] * 40), 4) as turn:
        turn.count(outputs(25))
        turn.count(outputs(0, Usage(40, 25, 0)))
    error = await refused(limited)
    assert "60 tokens a minute" in error.message and error.retry_after_s == pytest.approx(6.0)
    async with limited.turn("blue", SHORT, 4):
        pass
    clock.now += 5.5
    await refused(limited)
    clock.now += 0.6
    async with limited.turn("red", SHORT, 4):
        pass


async def test_a_prompt_counts_when_it_comes_and_is_set_right_with_usage():
    limited = tenants(red={"tokens_per_minute": 100})
    async with limited.turn("red", GenerateRequest(prompt="x" * 400), 4) as turn:
        await refused(limited)
        turn.count(outputs(1, Usage(20, 1, 0)))
    assert limited._tenants["red"].bucket.level == 79


async def test_what_the_engine_refuses_costs_nothing_what_a_client_gives_up_does():
    limited = tenants(red={"tokens_per_minute": 100})
    async with limited.turn("red", GenerateRequest(prompt_token_ids=[1] * 90), 4) as turn:
        turn.refuse()
    async with limited.turn("red", GenerateRequest(prompt_token_ids=[1] * 90), 4):
        pass
    assert limited._tenants["red"].bucket.level == 10


async def test_a_bucket_never_holds_more_than_a_minute():
    clock = Clock()
    bucket = TokenBucket(60, clock)
    clock.now += 1000
    bucket.take(-5)
    assert bucket.level == 60 and bucket.is_full
    bucket.take(61)
    assert bucket.seconds_until_open() == pytest.approx(2.0)


async def test_idle_tenants_are_forgotten():
    clock = Clock()
    limited = Tenants(lambda name: Limits(tokens_per_minute=60), clock)
    for number in range(3000):
        async with limited.turn(f"tenant-{number}", SHORT, 4):
            clock.now += 2.0
    assert len(limited._tenants) <= 1100
