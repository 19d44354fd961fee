"""What tenants use and may use: requests running and waiting, tokens a minute.

One event loop's; holds no request, only counts.  A request without a tenant (no authentication) has no limits here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from jserve.access.auth_file import Limits
from jserve.request import Code, GenerateRequest, GenerateUpdate, RequestError

RETRY_AFTER_S = 1.0
_CHARACTERS_PER_TOKEN = 4
_SWEEP_EVERY = 1024


@dataclass
class TokenBucket:
    """Holds a minute's tokens when full.  May be overdrawn, since nobody knows before how long an answer gets: who has
    overdrawn it waits until it holds something again."""

    per_minute: int
    now: Callable[[], float]
    level: float = 0.0
    at: float = 0.0

    def __post_init__(self):
        self.level, self.at = float(self.per_minute), self.now()

    def take(self, num_tokens: float) -> None:
        """Negative gives back."""
        self._fill()
        self.level = min(self.level - num_tokens, float(self.per_minute))

    def seconds_until_open(self) -> float:
        """0 where tokens may be used now."""
        self._fill()
        return 0.0 if self.level >= 1 else (1 - self.level) * 60 / self.per_minute

    @property
    def is_full(self) -> bool:
        self._fill()
        return self.level >= self.per_minute

    def _fill(self) -> None:
        now = self.now()
        self.level = min(self.level + (now - self.at) * self.per_minute / 60, float(self.per_minute))
        self.at = now


@dataclass
class _Tenant:
    """num_running counts those in the engine; who waits is in `queue`, first come, first served."""

    num_running: int = 0
    queue: deque[asyncio.Future] = field(default_factory=deque)
    bucket: TokenBucket | None = None

    @property
    def is_idle(self) -> bool:
        """Nothing would be lost with it."""
        return not self.num_running and not self.queue and (self.bucket is None or self.bucket.is_full)


class Turn:
    """One request that may run: counts its tokens against its tenant's bucket."""

    def __init__(self, bucket: TokenBucket | None, expected_prompt: int):
        self._bucket = bucket
        self._charged_prompt = expected_prompt
        self._has_output = False
        self._charge(expected_prompt)

    def count(self, update: GenerateUpdate) -> None:
        self._has_output = True
        self._charge(sum(len(delta.token_ids) for delta in update.outputs))
        if update.usage is not None:
            self._charge(update.usage.prompt_tokens - self._charged_prompt)
            self._charged_prompt = update.usage.prompt_tokens

    def refuse(self) -> None:
        """The engine refused the request, which so costs nothing; one that the client gave up is not given back."""
        if not self._has_output:
            self._charge(-self._charged_prompt)

    def _charge(self, num_tokens: int) -> None:
        if self._bucket is not None:
            self._bucket.take(num_tokens)


class Tenants:
    """All tenants that have something going on."""

    def __init__(self, limits_of: Callable[[str], Limits], now: Callable[[], float] = time.monotonic):
        self._limits_of = limits_of
        self._now = now
        self._tenants: dict[str, _Tenant] = {}

    @property
    def num_queued(self) -> int:
        return sum(len(tenant.queue) for tenant in self._tenants.values())

    @contextlib.asynccontextmanager
    async def turn(self, name: str | None, request: GenerateRequest, most_running: int) -> AsyncIterator[Turn]:
        """Waits until the tenant may run one more request, which it does while the block runs.

        `most_running` is what the engine runs at once: the limit where the tenant has none but may not queue for ever.
        RESOURCE_EXHAUSTED with a time to come back where the tenant's limits are used up.
        """
        if name is None:
            yield Turn(None, 0)
            return
        limits = self._limits_of(name)
        tenant = self._of(name)
        try:
            self._check_tokens(name, tenant, limits)
            await self._enter(name, tenant, limits, most_running)
            try:
                yield Turn(tenant.bucket, _expected_prompt_tokens(request))
            finally:
                tenant.num_running -= 1
                self._let_in(tenant, self._running_limit(self._limits_of(name), most_running))
        finally:
            if tenant.is_idle:
                self._tenants.pop(name, None)

    def _of(self, name: str) -> _Tenant:
        if name not in self._tenants:
            if len(self._tenants) % _SWEEP_EVERY == _SWEEP_EVERY - 1:  # a proxy may name any number of them
                self._tenants = {known: tenant for known, tenant in self._tenants.items() if not tenant.is_idle}
            self._tenants[name] = _Tenant()
        return self._tenants[name]

    def _check_tokens(self, name: str, tenant: _Tenant, limits: Limits) -> None:
        if limits.tokens_per_minute is None:
            tenant.bucket = None
            return
        if tenant.bucket is None or tenant.bucket.per_minute != limits.tokens_per_minute:
            tenant.bucket = TokenBucket(limits.tokens_per_minute, self._now)
        wait_s = tenant.bucket.seconds_until_open()
        if wait_s > 0:
            raise RequestError(
                Code.RESOURCE_EXHAUSTED,
                f"tenant {name!r} has used its {limits.tokens_per_minute} tokens a minute; the next one comes in"
                f" {wait_s:.1f} s",
                retry_after_s=wait_s,
            )

    async def _enter(self, name: str, tenant: _Tenant, limits: Limits, most_running: int) -> None:
        may_run = self._running_limit(limits, most_running)
        if may_run is None or (tenant.num_running < may_run and not tenant.queue):
            tenant.num_running += 1
            return
        if limits.max_waiting is not None and len(tenant.queue) >= limits.max_waiting:
            raise RequestError(
                Code.RESOURCE_EXHAUSTED,
                f"tenant {name!r} has {tenant.num_running} requests running and {len(tenant.queue)} waiting; its limits"
                f" are max_running = {may_run} and max_waiting = {limits.max_waiting}",
                retry_after_s=RETRY_AFTER_S,
            )
        place = asyncio.get_running_loop().create_future()
        tenant.queue.append(place)
        try:
            await place  # `_let_in` counts it as running
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                tenant.num_running -= 1
                self._let_in(tenant, may_run)
            else:
                tenant.queue.remove(place)
            raise

    def _let_in(self, tenant: _Tenant, may_run: int | None) -> None:
        while tenant.queue and (may_run is None or tenant.num_running < may_run):
            place = tenant.queue.popleft()
            if not place.done():
                tenant.num_running += 1
                place.set_result(None)

    def _running_limit(self, limits: Limits, most_running: int) -> int | None:
        if limits.max_running is not None:
            return limits.max_running
        return None if limits.max_waiting is None else most_running


def _expected_prompt_tokens(request: GenerateRequest) -> int:
    """Before the prompt is tokenised; what it really had is set right with its usage."""
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    messages = request.messages or ()
    num_characters = len(request.prompt or "") + sum(len(message.content) for message in messages)
    return max(1, num_characters // _CHARACTERS_PER_TOKEN)
