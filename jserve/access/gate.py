"""Decides who a caller is from what the transport has seen of it: a bearer token, a client certificate, metadata."""

from __future__ import annotations

import hashlib
import urllib.parse
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from jserve.access.auth_file import AuthTable, Limits, check_tenant, read_auth_file
from jserve.access.reloaded import Reloaded
from jserve.config import BadUsage, ServerSection
from jserve.request import Code, RequestError

TENANT_HEADER = "x-jserve-tenant"
"""Metadata, and HTTP header, in which a proxy names the tenant for whom it asks."""


@dataclass(frozen=True)
class Caller:
    """Who asks.  Without tokens everybody may do everything."""

    tenant: str | None = None
    is_admin: bool = True


@dataclass(frozen=True)
class Credentials:
    """What a transport has seen: every value of a header that is repeated, and names that TLS has verified."""

    authorization: Sequence[str] = ()
    tenant: Sequence[str] = ()
    certificate_names: Collection[str] = ()
    """Common name, DNS names and URIs of the client's certificate, in this order."""


class Gate:
    """Reads the auth file again when it changes."""

    def __init__(self, section: ServerSection):
        """ConfigError where the settings cannot be used."""
        self._table: Callable[[], AuthTable] = AuthTable
        if section.auth_file is not None:
            path = section.auth_file
            self._table = Reloaded([path], lambda: read_auth_file(path)).current
            if not self._table().tokens and section.tls_client_ca is None:
                raise BadUsage(f"server.auth_file = {path!r}: it has no [[token]], so nobody could call")
        self._knows_certificates = section.tls_client_ca is not None
        self._needs_token = section.auth_file is not None and bool(self._table().tokens)
        self._proxies = frozenset(name.strip() for name in section.trusted_proxies.split(",") if name.strip())
        if self._proxies and section.tls_client_ca is None:
            raise BadUsage(f"server.trusted_proxies = {section.trusted_proxies!r}: proxies are known by their client"
                              " certificates; give --tls-client-ca")

    def caller(self, seen: Credentials) -> Caller:
        """UNAUTHENTICATED where nothing says who this is; PERMISSION_DENIED where it claims to be somebody else."""
        is_proxy = not self._proxies.isdisjoint(seen.certificate_names)
        named = _single(seen.tenant, TENANT_HEADER)
        if named is not None and not check_tenant(named):
            raise RequestError(Code.INVALID_ARGUMENT,
                               f"{TENANT_HEADER}: must be 1 to 64 printable ASCII characters without spaces",
                               field=TENANT_HEADER)
        if not self._needs_token:
            caller = Caller(self._by_certificate(seen))
        elif is_proxy and named is not None and not seen.authorization:
            caller = Caller(is_admin=False)  # its certificate lets it in; for whom it asks comes below
        else:
            caller = self._by_token(seen)
        if named is None or named == caller.tenant:
            return caller
        if not is_proxy:
            raise RequestError(Code.PERMISSION_DENIED,
                               f"{TENANT_HEADER} is believed only from a proxy (server.trusted_proxies)",
                               field=TENANT_HEADER)
        return Caller(named, caller.is_admin)

    def limits_of(self, tenant: str) -> Limits:
        return self._table().limits_of(tenant)

    def _by_certificate(self, seen: Credentials) -> str | None:
        """The tenant that a client certificate names; None where no certificates are asked for."""
        if not self._knows_certificates:
            return None
        if not seen.certificate_names:
            raise RequestError(Code.UNAUTHENTICATED, "the client certificate has no common name, DNS name or URI")
        return _tenant_called(next(iter(seen.certificate_names)))

    def _by_token(self, seen: Credentials) -> Caller:
        authorization = _single(seen.authorization, "authorization")
        if authorization is None:
            raise RequestError(Code.UNAUTHENTICATED, "a bearer token is needed (authorization: Bearer ...)")
        scheme, _, presented = authorization.partition(" ")
        token = self._table().find(presented.strip())
        if scheme.lower() != "bearer" or token is None:
            raise RequestError(Code.UNAUTHENTICATED, "the bearer token is not known to this server")
        return Caller(token.tenant, token.is_admin)


def require_admin(caller: Caller, what: str) -> None:
    if not caller.is_admin:
        raise RequestError(Code.PERMISSION_DENIED, f"{what} needs a token with the role admin")


def _tenant_called(name: str) -> str:
    """A name of any form as a tenant's: `John Smith` is John%20Smith; different names stay different."""
    quoted = urllib.parse.quote(name, safe="!#$&'()*+,/:;=?@[]")
    if check_tenant(quoted):
        return quoted
    return "sha256:" + hashlib.sha256(name.encode()).hexdigest()[:40]


def _single(values: Sequence[str], name: str) -> str | None:
    if len(values) > 1:
        raise RequestError(Code.UNAUTHENTICATED, f"{name} is there {len(values)} times")
    return values[0] if values else None
