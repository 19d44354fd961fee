"""Which address the server may bind, and what to say where it cannot."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket

import grpc

from jserve.access.certificates import Certificates
from jserve.access.reloaded import Reloaded
from jserve.config import BadUsage, ConfigError, ServerSection


def check_host(section: ServerSection) -> None:
    """ConfigError where anybody on the network could call, and the config does not say that this is wanted; or where a
    port is none."""
    for name in ("port", "http_port", "metrics_port"):
        port = getattr(section, name)
        if port is not None and not 0 <= port <= 65535:
            raise BadUsage(f"server.{name} = {port}: must be in 0..65535 (0 picks a free one)")
    if section.insecure or section.tls_cert or section.auth_file or _is_loopback(section.host):
        return
    raise BadUsage(
        f"server.host = {section.host!r} is reachable from other machines, and there is neither TLS nor a token file;"
        " listen on 127.0.0.1, give --tls-cert and --tls-key or --auth-file, or --insecure to allow it"
    )


def warnings(section: ServerSection) -> list[str]:
    """What is allowed, and worth knowing, about who may call."""
    if _is_loopback(section.host):
        return []
    found = []
    if section.auth_file and not section.tls_cert:
        found.append("there is no TLS: bearer tokens and prompts travel readable (--tls-cert, --tls-key)")
    if not section.auth_file and not section.tls_client_ca:
        found.append(f"anybody who reaches {section.host} may call (--auth-file or --tls-client-ca tells who)")
    return found


def bind(server: grpc.aio.Server, host: str, port: int, source: Reloaded[Certificates] | None) -> int:
    """Binds the server and returns the port, which is a free one where `port` is 0.  ConfigError where it cannot."""
    check_port("server.port", host, port)
    try:
        if source is None:
            bound = server.add_insecure_port(join(host, port))
        else:
            bound = server.add_secure_port(join(host, port), _grpc_credentials(source))
    except RuntimeError:
        bound = 0
    if bound == 0:
        raise ConfigError(f"server.port = {port}: gRPC cannot listen on {join(host, port)}")
    return bound


def _grpc_credentials(source: Reloaded[Certificates]) -> grpc.ServerCredentials:
    """gRPC asks at each handshake; it is told of certificates only when they are new."""
    given = source.current()

    def newer() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        current = source.current()
        if current is given:
            return None
        given = current
        return _grpc_configuration(current)

    return grpc.dynamic_ssl_server_credentials(
        _grpc_configuration(given), newer, require_client_authentication=given.client_ca is not None)


def _grpc_configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(certificates.key, certificates.chain)], root_certificates=certificates.client_ca)


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        addresses = {ipaddress.ip_address(host)}
    except ValueError:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ConfigError(f"server.host = {host!r}: not an address of this machine ({error.strerror})") from None
        addresses = {ipaddress.ip_address(item[4][0]) for item in found}
    return all(address.is_loopback for address in addresses)


def sockets(host: str, port: int) -> list[socket.socket]:
    """Listening TCP sockets for the HTTP port, one for each address of the host.  ConfigError where it cannot."""
    check_port("server.http_port", host, port)
    bound: list[socket.socket] = []
    for family, kind, _, _, address in dict.fromkeys(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)):
        with contextlib.suppress(OSError):  # one of several is enough
            one = socket.socket(family, kind)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # Where the port is 0 the first address picks it for all.
            one.bind((address[0], bound[0].getsockname()[1] if bound else port, *address[2:]))
            one.listen(2048)
            bound.append(one)
    if not bound:
        raise ConfigError(f"server.http_port = {port}: cannot listen on {join(host, port)}")
    return bound


def check_port(key: str, host: str, port: int) -> None:
    """ConfigError where nobody could bind this.  gRPC would not say why, and write lines of its own to stderr."""
    errors = []
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, kind, _, _, address in addresses:
        try:
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            errors.append(error)
    numbers = [error.errno for error in errors]
    if errno.EADDRINUSE in numbers:
        flag = f"--{key.removeprefix('server.').replace('_', '-')}"
        raise ConfigError(
            f"{key} = {port}: already in use on {host}; choose another with {flag}, or 0 for a free one")
    if errno.EACCES in numbers:
        raise ConfigError(f"{key} = {port}: not permitted for this user; choose one above 1023")
    if len(errors) == len(addresses):  # one of several is enough: `localhost` on a machine without IPv6
        raise ConfigError(f"server.host = {host!r}: {errors[0].strerror}")
