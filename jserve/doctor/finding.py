"""What a check found, in one line, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class Finding:
    check: str
    """Which check: python, packages, devices, memory, ..."""
    status: str
    """ok; warn: it serves, though worse than it could; fail: it does not serve so."""
    text: str
    next_step: str | None = None
    """What a person can do, as a command where there is one."""
