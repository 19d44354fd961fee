"""What the server asks of an engine: `engine.async_engine.AsyncEngine` has it, and so has the scripted one of tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from prometheus_client import CollectorRegistry

from jserve.config import Config
from jserve.engine.info import Loads, ModelInfo
from jserve.request import GenerateRequest, GenerateUpdate


class Engine(Protocol):
    info: ModelInfo
    config: Config
    """With every `auto` resolved."""
    metrics_registry: CollectorRegistry
    """What the metrics page shows."""

    @property
    def state(self) -> str:
        """starting, ready, draining or stopped."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateUpdate, None]:
        """Updates of one request.  RequestError where it is refused; closing (`aclose`) or cancelling it aborts.

        The last update has `usage`, also that of a request which `abort` ended.
        """

    async def abort(self, request_id: str) -> bool:
        """Whether such a request was waiting or running."""

    def loads(self) -> Loads: ...

    async def flush_cache(self) -> int:
        """Number of blocks forgotten."""

    async def check_integrity(self) -> list[str]:
        """One line a violation."""

    async def start_profile(self, folder: str | None, num_steps: int | None) -> str:
        """The folder that the trace will be written to; None: one of the engine's choice.  RequestError: it cannot."""

    async def stop_profile(self) -> str:
        """The folder with the trace.  RequestError where none runs."""

    def begin_drain(self) -> None:
        """From now on `generate` raises UNAVAILABLE; what is waiting or running goes on."""

    async def close(self) -> None: ...
