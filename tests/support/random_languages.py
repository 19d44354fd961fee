"""Random small languages, each spelled twice: as a regular expression and as a Lark grammar."""

from __future__ import annotations

import random
import re

LITERALS = ["a", "Zb", "the ", "0", "-", " and ", "\u00e9", "\u65e5\u672c", '"', "{}", "\\", "/", "1.5"]
CLASSES = ["[a-f]", "[0-9]", "[A-Z ]", "[^a-z\n]", r"[A-Za-z0-9_-]"]
"""None that Python and Rust read differently, such as \\w."""


def random_language(rng: random.Random, depth: int = 3) -> tuple[str, str]:
    """(regular expression, Lark expression) of the same finite language."""
    kind = rng.choice(["literal", "class"] if depth == 0 else ["literal", "sequence", "sequence", "choice", "repeat"])
    if kind == "literal":
        text = rng.choice(LITERALS)
        return re.escape(text), '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if kind == "class":
        pattern = rng.choice(CLASSES)
        return pattern, f"/{pattern}/"
    parts = [random_language(rng, depth - 1) for _ in range(rng.choice([1, 2, 3]))]
    if kind == "sequence":
        return "".join(regex for regex, _ in parts), "(" + " ".join(lark for _, lark in parts) + ")"
    if kind == "choice":
        return "(?:" + "|".join(regex for regex, _ in parts) + ")", "(" + " | ".join(lark for _, lark in parts) + ")"
    low = rng.choice([0, 1, 2])
    high = low + rng.choice([0, 1, 4]) or 1
    [(regex, lark), *_] = parts
    return f"(?:{regex}){{{low},{high}}}", f"({lark}){{{low},{high}}}"
