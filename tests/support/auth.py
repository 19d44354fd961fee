"""Auth files for tests."""

from __future__ import annotations

import hashlib
from pathlib import Path

RED, BLUE, ROOT = "red-token-5f0c", "blue-token-91aa", "root-token-77de"
"""Tokens of the tenants red and blue, and of the admin `ops`."""


def entry(token: str, tenant: str, role: str | None = None) -> str:
    digest = hashlib.sha256(token.encode()).hexdigest()
    return f'[[token]]\nsha256 = "{digest}"\ntenant = "{tenant}"\n' + (f'role = "{role}"\n' if role else "")


def auth_file(folder: Path, more: str = "", tokens: str | None = None) -> str:
    """A file with the three tokens, or with `tokens`, and `more` sections; its path."""
    if tokens is None:
        tokens = entry(RED, "red") + entry(BLUE, "blue") + entry(ROOT, "ops", "admin")
    path = folder / "auth.toml"
    path.write_text(tokens + more)
    return str(path)
