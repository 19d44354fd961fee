"""`jserve serve`: gRPC, and HTTP beside it, from the memory arithmetic on stderr to the line that says it is ready."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

from jserve.cli import logs
from jserve.cli.command import Command
from jserve.cli.flags import add_config_flags, config_from
from jserve.cli.progress import StartReport
from jserve.config import BadUsage, Config
from jserve.local_engine import start_engine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_flags(parser, server=True)


def run(arguments: argparse.Namespace) -> int:
    config = config_from(arguments)
    if config.server.log_format not in logs.FORMATS:
        raise BadUsage(f"server.log_format = {config.server.log_format!r}: expected {' or '.join(logs.FORMATS)}")
    logs.set_up(
        sys.stderr, as_json=config.server.log_format == "json", requests=config.server.log_requests,
        debug=arguments.debug,
    )
    return asyncio.run(_serve(config))


async def _serve(config: Config) -> int:
    from jserve.http.front import http_front
    from jserve.server.serve import serve

    report = StartReport()
    began = time.perf_counter()

    def on_ready(server) -> None:
        report.close()
        http = f"; HTTP on {server.http_url}" if server.http_url else ""
        report.line(
            f"ready after {time.perf_counter() - began:.1f} s; gRPC on {server.address}{http}; stop with Ctrl-C")
        report.line(f"try: jserve chat --address {_reachable(server.address)}{_access_flags(config)}")

    try:
        return await serve(lambda: start_engine(config, report), config, on_ready=on_ready, front=http_front)
    finally:
        report.close()


def _access_flags(config: Config) -> str:
    """What a client has to show this server, as flags of `jserve chat`."""
    flags = [("--tls-ca CA.pem", config.server.tls_cert), ("--tls-cert CERT.pem --tls-key KEY.pem",
             config.server.tls_client_ca), ("--token-file FILE", config.server.auth_file)]
    return "".join(f" {flag}" for flag, is_needed in flags if is_needed)


def _reachable(address: str) -> str:
    """Where a client on this machine finds a server that listens everywhere."""
    return address.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")


COMMAND = Command(
    usage="[--model MODEL] [--port PORT] [--config FILE] [flags]",
    summary="Serves a model over gRPC.  Every shape is compiled before the server says that it is ready.",
    add_arguments=add_arguments,
    run=run,
    epilog="""\
examples:
  jserve serve                                        SmolLM2-135M on 127.0.0.1:50051
  jserve serve --model ./llama-3.2-1b --port 8000     a folder with config.json and safetensors
  jserve serve --http-port 8000                       the OpenAI API on http://127.0.0.1:8000/v1 as well
  jserve serve --config configs/cpu.toml --kv.block_size 64

Health, reflection and GetServerInfo answer at once; generation answers UNAVAILABLE until the line "ready".
SIGTERM drains: no new requests, running ones finish, exit code 0.""",
)
