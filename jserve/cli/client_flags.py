"""Flags of commands that call a running server: a token, from a file and never from the command line, and TLS."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jserve.config import BadUsage


_NAMES = ("token_file", "tls", "tls_ca", "tls_cert", "tls_key")


def add_client_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("with --address")
    group.add_argument("--token-file", metavar="FILE", help="file with the bearer token")
    group.add_argument("--tls", action="store_true", help="TLS, trusting the authorities that gRPC knows")
    group.add_argument("--tls-ca", metavar="FILE", help="TLS, trusting this PEM file's authorities")
    group.add_argument("--tls-cert", metavar="FILE", help="PEM certificate of this client (mutual TLS)")
    group.add_argument("--tls-key", metavar="FILE", help="PEM key of the certificate")


def client_access(arguments: argparse.Namespace) -> dict[str, Any]:
    """`token` and `tls` of a Client.  ConfigError where a file cannot be read, or no server is named."""
    given = [name for name in _NAMES if getattr(arguments, name)]
    if given and arguments.address is None:
        raise BadUsage(f"--{given[0].replace('_', '-')} has no meaning without --address")
    if (arguments.tls_cert is None) != (arguments.tls_key is None):
        raise BadUsage("--tls-cert and --tls-key go together")
    token = None if arguments.token_file is None else _read(arguments.token_file).strip()
    if not (arguments.tls or arguments.tls_ca or arguments.tls_cert):
        return {"token": token}
    from jserve.server.client_common import ClientTls

    for path in (arguments.tls_ca, arguments.tls_cert, arguments.tls_key):
        if path is not None:
            _read(path)
    return {"token": token, "tls": ClientTls(arguments.tls_ca, arguments.tls_cert, arguments.tls_key)}


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadUsage(f"{path}: cannot read it: {getattr(error, 'strerror', None) or error}") from None
