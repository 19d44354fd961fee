"""The auth file: bearer tokens, as hashes, with tenant and role, and what each tenant may use.

    [[token]]
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"   # `jserve token red` makes one
    tenant = "red"
    role = "admin"               # optional: may also drain, abort, flush

    [tenant.red]                 # optional; [default] is for tenants without a section of their own
    max_running = 8
    max_waiting = 100
    tokens_per_minute = 60000

A plain SHA-256 is enough where tokens are random (256 bits): there is nothing to guess from the hash.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass

from jserve.access.reloaded import read_bytes
from jserve.config import ConfigError

ADMIN = "admin"
_KEY = "server.auth_file"
_TENANT = re.compile(r"[!-~]{1,64}")


@dataclass(frozen=True)
class Limits:
    """What one tenant may use; None is no limit."""

    max_running: int | None = None
    """Requests in the engine at the same time."""
    max_waiting: int | None = None
    """Requests that wait until they may run; the next one is refused."""
    tokens_per_minute: int | None = None
    """Prompt and output tokens; a minute's worth may be used at once."""


@dataclass(frozen=True)
class Token:
    sha256: bytes
    tenant: str
    is_admin: bool


@dataclass(frozen=True)
class AuthTable:
    """An auth file as read."""

    tokens: tuple[Token, ...] = ()
    limits: Mapping[str, Limits] = dataclasses.field(default_factory=dict)
    default: Limits = Limits()

    def find(self, presented: str) -> Token | None:
        """The token's entry.  Compares with every entry, each in constant time, wherever the match is."""
        digest = hashlib.sha256(presented.encode(errors="replace")).digest()
        found = None
        for token in self.tokens:
            if hmac.compare_digest(digest, token.sha256):
                found = token
        return found

    def limits_of(self, tenant: str) -> Limits:
        return self.limits.get(tenant, self.default)


def read_auth_file(path: str) -> AuthTable:
    """ConfigError names the file and what is wrong in it, and never shows a hash."""
    try:
        tables = tomllib.loads(read_bytes(_KEY, path).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        # The parser's message may quote a line; a position is enough to find it.
        where = re.search(r"\(at [^)]*\)", str(error))
        raise _error(path, f"not valid TOML {where[0] if where else ''}".rstrip()) from None
    _check_keys(path, "the file", tables, ("token", "tenant", "default"))
    entries, tenants = tables.get("token", []), tables.get("tenant", {})
    if not isinstance(entries, list) or not isinstance(tenants, dict):
        raise _error(path, "tokens are [[token]] sections, tenants [tenant.NAME] sections")
    tokens = tuple(_token(path, number, entry) for number, entry in enumerate(entries, start=1))
    if len({token.sha256 for token in tokens}) < len(tokens):
        raise _error(path, "the same sha256 stands there twice")
    return AuthTable(
        tokens,
        {_tenant(path, f"[tenant.{name}]", name): _limits(path, f"[tenant.{name}]", values)
         for name, values in tenants.items()},
        _limits(path, "[default]", tables.get("default", {})),
    )


def check_tenant(name: object) -> bool:
    """Whether this can be a tenant's name: up to 64 printable ASCII characters without spaces."""
    return isinstance(name, str) and _TENANT.fullmatch(name) is not None


def _token(path: str, number: int, entry: object) -> Token:
    where = f"[[token]] number {number}"
    _check_keys(path, where, entry, ("sha256", "tenant", "role"))
    digest = entry.get("sha256")
    if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", digest):
        raise _error(path, f"{where}: sha256 must be the 64 hex digits of the token's SHA-256, never the token itself")
    role = entry.get("role")
    if role not in (None, ADMIN):
        raise _error(path, f"{where}: role = {role!r}: only {ADMIN!r} is known")
    return Token(bytes.fromhex(digest), _tenant(path, where, entry.get("tenant")), role == ADMIN)


def _tenant(path: str, where: str, name: object) -> str:
    if not check_tenant(name):
        raise _error(path, f"{where}: tenant = {name!r}: must be 1 to 64 printable ASCII characters without spaces")
    return name


def _limits(path: str, where: str, values: object) -> Limits:
    names = [field.name for field in dataclasses.fields(Limits)]
    _check_keys(path, where, values, names)
    for name, value in values.items():
        lowest = 0 if name == "max_waiting" else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            raise _error(path, f"{where}: {name} = {value!r}: must be an integer of {lowest} or more")
    return Limits(**values)


def _check_keys(path: str, where: str, table: object, known) -> None:
    if not isinstance(table, dict):
        raise _error(path, f"{where} must be a section")
    for name in table:
        if name not in known:
            raise _error(path, f"{where}: unknown key {name!r}; known: {', '.join(known)}")


def _error(path: str, what: str) -> ConfigError:
    return ConfigError(f"{_KEY} = {path!r}: {what}")
