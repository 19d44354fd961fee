"""What the blocking and the asyncio client share: requests, channel options, gRPC errors -> RequestError."""

from __future__ import annotations

import contextlib
import ipaddress
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from jserve.proto_gen import inference_pb2
from jserve.request import Code, GenerateRequest, Message, RequestError
from jserve.server import convert
from jserve.server.errors import from_rpc_error

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
READY_POLL_S = 0.1


@dataclass(frozen=True)
class ClientTls:
    """How a client speaks TLS: PEM files, and what the server is called."""

    ca: str | None = None
    """Who must have signed the server's certificate.  None: the authorities that gRPC knows."""
    cert: str | None = None
    """The client's own certificate chain, for mutual TLS; with its key."""
    key: str | None = None
    server_name: str | None = None
    """The name in the server's certificate, where it is not the address's."""

    def credentials(self) -> grpc.ChannelCredentials:
        """OSError where a file cannot be read."""
        ca, key, cert = (None if path is None else Path(path).read_bytes() for path in (self.ca, self.key, self.cert))
        return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)


def call_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """What goes with every call."""
    return () if token is None else (("authorization", f"Bearer {token}"),)


@contextlib.contextmanager
def as_request_errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None


def timeout_of(request: GenerateRequest) -> float | None:
    """Seconds that gRPC gives the call."""
    return None if request.deadline is None else max(0.0, request.deadline - time.monotonic())


def tokenize_request(
    prompt: str | Sequence[Message], add_special_tokens: bool | None, add_generation_prompt: bool | None
) -> inference_pb2.TokenizeRequest:
    request = inference_pb2.TokenizeRequest(add_special_tokens=add_special_tokens,
                                            add_generation_prompt=add_generation_prompt)
    if isinstance(prompt, str):
        convert.set_field(request, "prompt", prompt)
    else:
        request.messages.extend(convert.messages_to_proto(prompt))
    return request


def detokenize_request(token_ids: Sequence[int], skip_special_tokens: bool) -> inference_pb2.DetokenizeRequest:
    request = inference_pb2.DetokenizeRequest(skip_special_tokens=skip_special_tokens)
    convert.set_field(request, "token_ids", token_ids)
    return request


def raise_if_late(end: float, timeout_s: float, failure: RequestError | None) -> None:
    """DEADLINE_EXCEEDED once the clock has passed `end`; `failure` says what the last look at the server gave."""
    if time.monotonic() >= end:
        why = f": {failure.message}" if failure else ""
        raise RequestError(Code.DEADLINE_EXCEEDED, f"the server was not ready within {timeout_s:g} s{why}")


def channel_options(address: str, max_message_bytes: int, tls: ClientTls | None = None) -> list[tuple[str, object]]:
    named = tls is not None and tls.server_name is not None
    return [
        *([("grpc.ssl_target_name_override", tls.server_name)] if named else []),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.ping_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Each client its own connection; a proxy of the environment has no business with this machine's own ports.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0 if _is_this_machine(address) else 1),
    ]


def _is_this_machine(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
