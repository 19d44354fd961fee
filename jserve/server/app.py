"""The gRPC server: listens before there is an engine, serves once one is attached, drains, stops.

Knows no signals and no process (`serve` does) and builds no engine.
"""

from __future__ import annotations

import asyncio
import logging

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jserve.access.certificates import certificates
from jserve.config import Config
from jserve.proto_gen import control_pb2, inference_pb2
from jserve.request import Code, RequestError
from jserve.server import listen
from jserve.server.control_service import ADMIN_METHODS, ControlService
from jserve.server.engine import Engine
from jserve.server.health import Health
from jserve.server.inference_service import InferenceService
from jserve.server.rpc import service_handler
from jserve.server.state import RETRY_AFTER_S, ServerState

log = logging.getLogger(__name__)

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
CONTROL = control_pb2.DESCRIPTOR.services_by_name["Control"]
SERVICES = (INFERENCE.full_name, CONTROL.full_name)

_STOP_GRACE_S = 0.5
"""Seconds that calls which are no generation get to end when the server stops."""


class Server:
    """One server on one port.  start -> attach -> begin_drain -> finish_drain -> stop; stop is right at any time."""

    def __init__(self, config: Config):
        listen.check_host(config.server)
        self.certificates = certificates(config.server)
        self.state = ServerState(config)
        self.health = Health(SERVICES)
        self.drain_requested = asyncio.Event()
        self.port = 0
        self.http_url: str | None = None
        """Where an HTTP front of this server listens; it says so itself."""
        self._drain_timeout_s = config.server.drain_timeout_s
        self._hurry = asyncio.Event()
        self._grpc = grpc.aio.server(options=_channel_options(config.server.max_message_bytes))
        self._grpc.add_generic_rpc_handlers([
            service_handler(INFERENCE, InferenceService(self.state), self.state.gate),
            service_handler(CONTROL, ControlService(self.state, self.begin_drain), self.state.gate, ADMIN_METHODS),
        ])
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._grpc)
        reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), self._grpc)

    @property
    def address(self) -> str:
        return listen.join(self.state.config.server.host, self.port)

    async def start(self) -> None:
        """Listens: health, reflection and GetServerInfo answer, generation is UNAVAILABLE.  ConfigError: it cannot."""
        section = self.state.config.server
        self.port = listen.bind(self._grpc, section.host, section.port, self.certificates)
        for warning in listen.warnings(section):
            log.warning("%s", warning)
        await self._grpc.start()

    def attach(self, engine: Engine) -> None:
        """The engine is ready: requests are welcome, unless the server drains already."""
        self.state.engine = engine
        if self.state.is_draining:
            engine.begin_drain()
        else:
            self.health.set_serving(True)

    def begin_drain(self, timeout_s: float | None = None) -> None:
        """Health says NOT_SERVING and new generation calls are UNAVAILABLE; `drain_requested` is set.  Idempotent."""
        if self.state.is_draining:
            return
        self.health.set_serving(False)
        self.state.is_draining = True
        if timeout_s is not None:
            self._drain_timeout_s = timeout_s
        if self.state.engine is not None and not self.state.tenants.num_queued:
            # Requests that wait for their tenant's turn were accepted too; new ones are refused by `is_draining`.
            self.state.engine.begin_drain()
        self.drain_requested.set()

    def hurry(self) -> None:
        """Ends a drain now: what is still open is cut."""
        self._hurry.set()

    async def finish_drain(self) -> int:
        """Waits for the open generation calls, then cuts those that are left; the number of calls cut."""
        waits = [asyncio.ensure_future(self.state.calls.wait_until_empty()), asyncio.ensure_future(self._hurry.wait())]
        await asyncio.wait(waits, timeout=self._drain_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        num_cut = self.state.calls.cut(RequestError(
            Code.UNAVAILABLE, "the server stopped before the request was finished", retry_after_s=RETRY_AFTER_S))
        if num_cut:
            log.warning("cut %d requests that were not finished when the drain ended", num_cut)
        return num_cut

    async def stop(self) -> None:
        """Closes the port.  Calls that are still open get a moment to end."""
        self.health.set_serving(False)
        self.health.close()
        self.state.is_stopped = True
        await self._grpc.stop(_STOP_GRACE_S)


def _channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        # Two servers on one port would each get some of the calls, without a word.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # A client that vanished without closing its connection is noticed, and its blocks freed, in 40 s.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.ping_timeout_ms", 20_000),  # 60 s, and stronger than keepalive_timeout_ms, where it is not set
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Clients may ping every 10 s, also without calls; the half leaves room for jitter.
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ]
