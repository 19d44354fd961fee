"""`jserve token TENANT`: makes a bearer token, and the lines of the auth file that let it in."""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
import sys

from jserve.access.auth_file import ADMIN, check_tenant
from jserve.cli.command import Command
from jserve.config import BadUsage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tenant", metavar="TENANT", help="whose token it is: fair share, limits, prefix cache")
    parser.add_argument("--admin", action="store_true", help="may also drain, abort and flush")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    if not check_tenant(arguments.tenant):
        raise BadUsage(f"TENANT = {arguments.tenant!r}: must be 1 to 64 printable ASCII characters without spaces")
    token = secrets.token_urlsafe(32)
    digest = hashlib.sha256(token.encode()).hexdigest()
    if arguments.json:
        print(json.dumps({"token": token, "sha256": digest, "tenant": arguments.tenant,
                          "role": ADMIN if arguments.admin else None}))
        return 0
    print(token)
    print("# The token is shown this once; these lines go into the auth file (--auth-file).", file=sys.stderr)
    print(f'[[token]]\nsha256 = "{digest}"\ntenant = {json.dumps(arguments.tenant)}', file=sys.stderr)
    if arguments.admin:
        print(f'role = "{ADMIN}"', file=sys.stderr)
    return 0


COMMAND = Command(
    usage="TENANT [--admin] [--json]",
    summary="Makes a bearer token: the token on stdout, the lines for the auth file on stderr.",
    add_arguments=add_arguments,
    run=run,
    epilog="""\
examples:
  jserve token red > red.token 2>> auth.toml
  jserve token ops --admin
  jserve serve --auth-file auth.toml
  jserve chat --address 127.0.0.1:50051 --token-file red.token""",
)
