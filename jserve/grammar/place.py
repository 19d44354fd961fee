"""Where a refusal's fault lies: the path in the schema, the character in the pattern, the line in the grammar.

llguidance says what is wrong, and mostly not where.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jserve.grammar.keywords import escaped, subschemas

MOST_COMPILES = 100
MOST_CHARACTERS = 200_000
"""Of schemas compiled in search of a fault: a fraction of a second."""

_PARSE_ERROR = re.compile(
    r"(?:invalid regex .*)?regex parse error:\n {4}(?P<shown>.*)\n {4}(?P<blanks> *)\^+\nerror: (?P<why>.*)"
)
_LOOK_AROUND = re.compile(
    r"(?:invalid regex .*)?lookarounds not supported yet; (?P<kind>\w+) in regex /(?P<shown>.*)/"
)
_ASSERTIONS = {"WordUnicode": r"\b", "WordUnicodeNegate": r"\B", "Start": "^", "End": "$"}
_GBNF_NAME = re.compile(r"Rule '([^']+)' not found")


@dataclass(frozen=True)
class PatternFault:
    """What is wrong with a regular expression."""

    why: str
    shown: str
    """The pattern as llguidance read it: some characters are escaped."""
    index: int | None
    """In `shown`."""
    text: str
    """What of the message says all this."""

    def character(self, pattern: str | None = None) -> str:
        """` at character 3`, counted from 1 in the pattern as the client wrote it; nothing where it is unknown."""
        if self.index is None:
            return ""
        at, place = 0, 0
        while pattern is not None and at < len(pattern) and place < self.index:
            place += 1 if self.shown[place] == pattern[at] else 2
            at += 1
        return f" at character {(self.index if pattern is None else at) + 1}"


def pattern_fault(error: str) -> PatternFault | None:
    """None where the message is about something else."""
    if found := _PARSE_ERROR.search(error):
        return PatternFault(found["why"], found["shown"], len(found["blanks"]), found[0])
    if found := _LOOK_AROUND.search(error):
        written = _ASSERTIONS.get(found["kind"], found["kind"])
        index = found["shown"].find(written)
        here = " here" if written in ("^", "$") else ""  # at the pattern's ends they are
        why = f"{written} is not supported{here}"
        return PatternFault(why, found["shown"], None if index < 0 else index, found[0])
    return None


def place_in_schema(schema: object, error: str, error_of: Callable[[object], str | None]) -> str | None:
    """JSON pointer, as `#/properties/a/oneOf`, of what alone makes the same error: the innermost schema, its keyword.

    Args:
      error_of: compiles a schema; its error, or None.
    """
    budget = _Budget(error_of, schema)
    if budget.error_of(schema) != error:
        return None
    place, node = "#", schema
    while isinstance(node, dict):
        at_fault = [(at, one) for at, one in subschemas(place, node) if budget.error_of(one) == error][:1]
        if not at_fault:
            break
        [(place, node)] = at_fault
    else:
        return place
    for key in sorted(node, key=lambda key: key == "type"):  # without its type another keyword might bind nothing
        if budget.error_of({name: value for name, value in node.items() if name != key}) not in (error, _SPENT):
            return f"{place}/{escaped(key)}"
    return place


_SPENT = "\0"
"""Stands for the error of what was not compiled any more."""


class _Budget:
    """Compiles parts of one schema, with what their references need, as long as it may."""

    def __init__(self, error_of: Callable[[object], str | None], whole: object):
        self._error_of = error_of
        whole = whole if isinstance(whole, dict) else {}
        self._definitions = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
        self._left = [MOST_COMPILES, MOST_CHARACTERS]

    def error_of(self, schema: object) -> str | None:
        schema = {**self._definitions, **schema} if isinstance(schema, dict) else schema
        self._left[0] -= 1
        self._left[1] -= len(json.dumps(schema))
        return self._error_of(schema) if min(self._left) >= 0 else _SPENT


def place_in_gbnf(grammar: str, error: str) -> str:
    """` at line 2 column 5` of a rule that is used and nowhere defined; nothing for other errors, which name the place."""
    named = _GBNF_NAME.search(error)
    used = named and re.search(rf"(?<![\w-]){re.escape(named[1])}(?![\w-])", grammar)
    if not used:
        return ""
    before = grammar[: used.start()]
    return f" at line {before.count(chr(10)) + 1} column {len(before) - before.rfind(chr(10))}"
