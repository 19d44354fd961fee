"""`python -m tests.support.fake_server`: `serve` around a FakeEngine, for tests of signals and exit codes."""

from __future__ import annotations

import argparse
import asyncio
import sys

from jserve.config import ConfigError
from jserve.http.front import http_front
from jserve.server.serve import serve
from tests.support.fake_engine import FakeEngine
from tests.support.grpc_server import config


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-s", type=float, default=0.01)
    parser.add_argument("--start-s", type=float, default=0.0)
    parser.add_argument("--max-running", type=int, default=1000)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--http-port", type=int)
    for name in ("auth-file", "tls-cert", "tls-key"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--drain-timeout-s", type=float, default=30.0)
    parser.add_argument("--stop-after-s", type=float, help="the engine stops by itself")
    arguments = parser.parse_args()

    async def factory() -> FakeEngine:
        await asyncio.sleep(arguments.start_s)
        engine = FakeEngine(step_s=arguments.step_s, max_running=arguments.max_running)
        if arguments.stop_after_s is not None:
            asyncio.get_running_loop().call_later(arguments.stop_after_s, setattr, engine, "state", "stopped")
        return engine

    settings = config(port=arguments.port, drain_timeout_s=arguments.drain_timeout_s, http_port=arguments.http_port,
                      auth_file=arguments.auth_file, tls_cert=arguments.tls_cert, tls_key=arguments.tls_key)
    try:
        return asyncio.run(serve(
            factory, settings, front=http_front,
            on_listening=lambda server: print("listening", server.address, server.http_url, flush=True),
            on_ready=lambda server: print("ready", server.address, flush=True),
        ))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
