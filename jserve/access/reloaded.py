"""A value read from files that may be replaced while the server runs: certificates, keys, the auth file."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from jserve.config import BadUsage, ConfigError

log = logging.getLogger(__name__)

Value = TypeVar("Value")


class Reloaded(Generic[Value]):
    """`current()` looks at the files' times and sizes and reads them again where these changed.

    A file that cannot be used keeps the last good value in force: half-written files and a certificate whose key comes
    a moment later are no outage.
    """

    def __init__(self, paths: Sequence[str], read: Callable[[], Value]):
        """ConfigError where the files cannot be used now."""
        self._paths = tuple(paths)
        self._read = read
        self._signature = self._look()
        self._value = read()

    def current(self) -> Value:
        signature = self._look()
        if signature != self._signature:
            self._signature = signature
            try:
                self._value = self._read()
                log.info("read again: %s", ", ".join(self._paths))
            except ConfigError as error:
                log.error("%s; what was read before stays in force", error)
        return self._value

    def _look(self) -> tuple:
        signature = []
        for path in self._paths:
            try:
                status = os.stat(path)
                signature.append((status.st_mtime_ns, status.st_size, status.st_ino))
            except OSError:
                signature.append(None)
        return tuple(signature)


def read_bytes(key: str, path: str) -> bytes:
    """The file's bytes; ConfigError that names the setting where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise BadUsage(f"{key} = {path!r}: {error.strerror}") from None
