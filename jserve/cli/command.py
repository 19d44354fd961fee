"""What a command is: texts for --help, flags, and a function from the parsed flags to an exit code."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    usage: str
    """What follows `jserve NAME` in the usage line."""
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    epilog: str = ""
    """Examples, shown as they are."""
