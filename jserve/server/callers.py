"""Who calls over gRPC: what the connection and the metadata say, judged by the gate."""

from __future__ import annotations

import grpc

from jserve.access.gate import TENANT_HEADER, Caller, Credentials, Gate

_NAME_PROPERTIES = ("x509_common_name", "peer_dns", "peer_uri")
"""Of a client certificate, which gRPC asks for, and verifies, under mutual TLS only."""


def caller_of(gate: Gate, context: grpc.aio.ServicerContext) -> Caller:
    """UNAUTHENTICATED or PERMISSION_DENIED where the gate says so."""
    metadata = context.invocation_metadata() or ()
    peer = context.auth_context() or {}
    names = [value.decode("utf-8", "replace") for name in _NAME_PROPERTIES for value in peer.get(name, ())]
    return gate.caller(Credentials(
        authorization=_values(metadata, "authorization"),
        tenant=_values(metadata, TENANT_HEADER),
        certificate_names=tuple(dict.fromkeys(filter(None, names))),  # gRPC calls a name that is not there ""
    ))


def _values(metadata, name: str) -> list[str]:
    return [value for key, value in metadata if key == name]
