"""grpc.health.v1 for asyncio: one status for the whole server and each of its services.

Our own and not grpcio-health-checking's servicer, which holds a lock while it writes to a watcher: there one watcher
that does not read would hold up the change to NOT_SERVING, and with it the drain.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_Status = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):
    """NOT_SERVING until `set_serving(True)`."""

    def __init__(self, services: Sequence[str]):
        self._services = frozenset(("", *services))
        self._is_serving = False
        self._is_closed = False
        self._changed = asyncio.Event()

    def set_serving(self, is_serving: bool) -> None:
        self._is_serving = is_serving
        self._wake_watchers()

    def close(self) -> None:
        """Ends the watchers' streams."""
        self._is_closed = True
        self._wake_watchers()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service[:100]!r}")
        return _Status(status=self._status(request.service))

    async def List(
        self, request: health_pb2.HealthListRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthListResponse:
        return health_pb2.HealthListResponse(
            statuses={service: _Status(status=self._status(service)) for service in self._services})

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        sent = None
        while True:
            changed, status = self._changed, self._status(request.service)
            if status != sent:
                yield _Status(status=status)
                sent = status
            if self._is_closed:
                return
            await changed.wait()

    def _status(self, service: str) -> int:
        if service not in self._services:
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if self._is_serving else _Status.NOT_SERVING

    def _wake_watchers(self) -> None:
        """Watchers wait for the event that was current when they looked, so that none misses a change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
