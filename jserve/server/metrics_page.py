"""The Prometheus text page, on a port of its own, where `server.metrics_port` is set."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from prometheus_client import start_http_server

from jserve.config import ConfigError, ServerSection
from jserve.server.engine import Engine


@contextlib.contextmanager
def metrics_page(section: ServerSection, engine: Engine) -> Iterator[int | None]:
    """Serves the engine's metrics at /metrics while the block runs; yields the port, None where none was asked for.

    Raises:
      ConfigError: the port cannot be bound.
    """
    if section.metrics_port is None:
        yield None
        return
    try:
        server, thread = start_http_server(section.metrics_port, addr=section.host, registry=engine.metrics_registry)
    except OSError as error:
        raise ConfigError(
            f"server.metrics_port = {section.metrics_port}: cannot listen on {section.host}: {error.strerror}"
        ) from None
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
