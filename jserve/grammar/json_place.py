"""Where in a JSON schema a complaint is about: llguidance names keyword or value, a person wants the path."""

from __future__ import annotations

import json
import re

_NAMED = re.compile(r'Unimplemented keys: (\[.*?\])|Invalid type: (\S+)')


def find_key(schema: object, message: str) -> str | None:
    """JSON pointer (as in `#/properties/a/contains`) of the first keyword or type that the message names, or None."""
    named = _NAMED.search(message)
    if named is None:
        return None
    if named[1] is not None:
        wanted = set(json.loads(named[1]))
        return _search(schema, "#", lambda key, _: key in wanted)
    return _search(schema, "#", lambda key, value: key == "type" and value == named[2])


def _search(node: object, path: str, is_it) -> str | None:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        here = f"{path}/{str(key).replace('~', '~0').replace('/', '~1')}"
        if is_it(key, value):
            return here
        found = _search(value, here, is_it)
        if found is not None:
            return found
    return None
