"""Values of flags: numbers with bounds, and lists of them; a wrong one is one line that says what was expected."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def whole(lowest: int = 1) -> Callable[[str], int]:
    """An integer of at least `lowest`."""

    def parse(text: str) -> int:
        try:
            if (value := int(text)) >= lowest:
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer of at least {lowest}")

    return parse


def number(lowest: float = 0.0, highest: float = float("inf"), *, above: bool = False) -> Callable[[str], float]:
    """A number from `lowest` (or above it) to `highest`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
            if lowest <= value <= highest and not (above and value == lowest):
                return value
        except ValueError:
            pass
        kind = f"above {lowest:g}" if above else f"of at least {lowest:g}"
        upto = "" if highest == float("inf") else f" and at most {highest:g}"
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number {kind}{upto}")

    return parse


def whole_list(text: str) -> tuple[int, ...]:
    """`1,8,32`."""
    return tuple(whole()(part) for part in text.split(","))


def number_list(text: str) -> tuple[float, ...]:
    """`25,50,100`."""
    return tuple(number(above=True)(part) for part in text.split(","))


def percentages(text: str) -> tuple[float, ...]:
    """`50,99,99.9`."""
    return tuple(number(0, 100)(part) for part in text.split(","))
