"""How many files this process may have open: a connection is one, and the usual limit of 1,024 is soon reached."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import time
from typing import Any

from jserve.config import ServerSection

SPARE = 256
"""Besides one a caller: libraries, devices, checkpoints, logs."""

log = logging.getLogger(__name__)


def wanted_files(section: ServerSection) -> int:
    return section.max_concurrent_streams + SPARE


def allow_open_files(section: ServerSection) -> None:
    """Raises the soft limit as far as is wanted and the hard limit lets; warns where that is too little."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = wanted_files(section)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= wanted:
        return
    allowed = wanted if hard == unlimited else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        log.warning(
            "%d open files allowed, server.max_concurrent_streams = %d wants %d: callers beyond that cannot connect (raise"
            " `ulimit -Hn`, or LimitNOFILE in a systemd unit)", allowed, section.max_concurrent_streams, wanted,
        )


class FewWords:
    """An event loop's exception handler that says once in a while, in one line, that there are no more files.

    asyncio writes a traceback for each connection that it cannot accept, as many as its backlog is long, every second.
    """

    EVERY_S = 10.0

    def __init__(self) -> None:
        self._last: float | None = None

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if getattr(context.get("exception"), "errno", None) not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
            return
        now = time.monotonic()
        if self._last is None or now - self._last >= self.EVERY_S:
            self._last = now
            log.error("no more files can be opened: new HTTP callers wait until others leave (`ulimit -n`, LimitNOFILE)")
