"""The server's certificates: read, checked, and read again when the files change, with no restart."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from dataclasses import dataclass

from jserve.access.reloaded import Reloaded, read_bytes
from jserve.config import BadUsage, ConfigError, ServerSection


@dataclass(frozen=True)
class Certificates:
    """PEM bytes as gRPC wants them, and the same as a context for HTTP."""

    chain: bytes
    key: bytes
    client_ca: bytes | None
    """Set: callers must show a certificate signed by one of these (mutual TLS)."""
    context: ssl.SSLContext


def certificates(section: ServerSection) -> Reloaded[Certificates] | None:
    """None where no TLS is asked for; ConfigError where the settings or the files cannot be used."""
    if section.tls_cert is None and section.tls_key is None:
        if section.tls_client_ca is not None:
            raise BadUsage("server.tls_client_ca: needs --tls-cert and --tls-key too")
        return None
    if section.tls_cert is None or section.tls_key is None:
        missing = "tls_cert" if section.tls_cert is None else "tls_key"
        raise BadUsage(f"server.{missing}: TLS needs both --tls-cert and --tls-key")
    paths = [path for path in (section.tls_cert, section.tls_key, section.tls_client_ca) if path is not None]
    return Reloaded(paths, lambda: _read(section))


def context_for_http(section: ServerSection, source: Reloaded[Certificates]) -> ssl.SSLContext:
    """A context that hands each new connection to the current certificates."""
    context = _context(section)

    def switch(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        connection.context = source.current().context

    context.sni_callback = switch
    return context


def names_in(peer_certificate: dict | None) -> tuple[str, ...]:
    """Common name, DNS names and URIs of a certificate as Python's ssl gives it (verified ones only)."""
    if not peer_certificate:
        return ()
    common = (value for part in peer_certificate.get("subject", ()) for kind, value in part if kind == "commonName")
    others = [(kind, value) for kind, value in peer_certificate.get("subjectAltName", ()) if kind in ("DNS", "URI")]
    return _unique((*common, *(value for _, value in sorted(others, key=lambda other: other[0]))))


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, names)))


def _read(section: ServerSection) -> Certificates:
    chain = read_bytes("server.tls_cert", section.tls_cert)
    key = read_bytes("server.tls_key", section.tls_key)
    client_ca = None
    if section.tls_client_ca is not None:
        client_ca = read_bytes("server.tls_client_ca", section.tls_client_ca)
    return Certificates(chain, key, client_ca, _context(section))


def _context(section: ServerSection) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        # An encrypted key would ask for its password on the terminal.
        context.load_cert_chain(section.tls_cert, section.tls_key, password=_no_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise ConfigError(f"server.tls_cert = {section.tls_cert!r}, server.tls_key = {section.tls_key!r}: not a PEM"
                          f" certificate with its key ({reason})") from None
    if section.tls_client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(section.tls_client_ca)
        except (ssl.SSLError, OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or str(error)
            raise ConfigError(
                f"server.tls_client_ca = {section.tls_client_ca!r}: no PEM certificates ({reason})") from None
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted; give an unencrypted one")
