"""Keywords of a JSON schema that no draft knows: JSON Schema ignores them, so a misspelt `minimun` would bind nothing.

llguidance refuses the keywords that it knows and lacks; this refuses what it has never heard of.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

_CONSTRAINTS = frozenset(
    "type enum const allOf anyOf oneOf not if then else properties patternProperties additionalProperties "
    "propertyNames required minProperties maxProperties dependencies dependentRequired dependentSchemas "
    "unevaluatedProperties items prefixItems additionalItems unevaluatedItems contains minContains maxContains "
    "minItems maxItems uniqueItems minLength maxLength pattern format minimum maximum exclusiveMinimum "
    "exclusiveMaximum multipleOf $ref $dynamicRef $recursiveRef $defs definitions".split()
)
_ANNOTATIONS = frozenset(
    "title description default examples example deprecated readOnly writeOnly $comment $schema $id id $anchor "
    "$dynamicAnchor $recursiveAnchor $vocabulary contentMediaType contentEncoding contentSchema discriminator".split()
)
"""They bind nothing by definition (discriminator is OpenAPI's; pydantic writes it beside oneOf); so do x-... names."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMAS = (
    "items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "contains",
    "propertyNames", "not", "if", "then", "else", "allOf", "anyOf", "oneOf", "prefixItems",
)  # fmt: skip


def unknown_keyword(schema: object) -> str | None:
    """What is wrong with the first keyword that nobody knows, with its JSON pointer; None where all are known."""
    stack = [("#", schema)]
    while stack:
        place, node = stack.pop()
        if not isinstance(node, dict):
            continue
        for key in node:
            if key not in _CONSTRAINTS and key not in _ANNOTATIONS and not key.startswith("x-"):
                near = difflib.get_close_matches(key, _CONSTRAINTS, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                return f"unknown keyword at {place}/{_escaped(key)}{hint}"
        stack.extend(reversed(list(_subschemas(place, node))))
    return None


def _subschemas(place: str, node: dict) -> Iterator[tuple[str, object]]:
    for name in _MAPS:
        if isinstance(node.get(name), dict):
            yield from ((f"{place}/{name}/{_escaped(key)}", inner) for key, inner in node[name].items())
    for name in _SCHEMAS:
        inner = node.get(name)
        if isinstance(inner, list):
            yield from ((f"{place}/{name}/{index}", one) for index, one in enumerate(inner))
        else:
            yield f"{place}/{name}", inner


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
