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
    "$dynamicAnchor $recursiveAnchor $vocabulary contentMediaType contentEncoding contentSchema discriminator "
    "externalDocs errorMessage enumNames strict".split()
)
"""They bind nothing by definition (discriminator is OpenAPI's; pydantic writes it beside oneOf, form builders the last
three); so do x-... names."""
_ENFORCED_FORMATS = frozenset("date date-time time duration email hostname ipv4 ipv6 uuid uri unknown".split())
_OTHER_FORMATS = frozenset(
    "idn-email idn-hostname uri-reference iri iri-reference uri-template json-pointer relative-json-pointer regex".split()
)
"""JSON Schema's own that llguidance lacks; what JSON Schema does not define (binary, password) is an annotation."""
_NEUTRAL = {
    "uniqueItems": (False,), "nullable": (False,), "unevaluatedProperties": (True, {}), "unevaluatedItems": (True, {}),
    "propertyNames": (True, {}), "dependentRequired": ({},), "dependentSchemas": ({},), "dependencies": ({},),
}  # fmt: skip
"""Values that ask for nothing, of keywords that llguidance lacks."""
_HINTS = {"nullable": '; JSON Schema says "type": [..., "null"]'}
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMAS = (
    "items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "contains",
    "propertyNames", "not", "if", "then", "else", "allOf", "anyOf", "oneOf", "prefixItems",
)  # fmt: skip


def unknown_keyword(schema: object) -> str | None:
    """What is wrong with the first keyword or format that nobody can hold, with its JSON pointer; None where there is none."""
    for place, node in _schemas_in(schema):
        if isinstance(node.get("format"), str) and node["format"] in _OTHER_FORMATS:
            return f"format {node['format']!r} at {place}/format is not supported"
        for key in node:
            is_known = key in _CONSTRAINTS or key in _ANNOTATIONS or key.startswith("x-") or _is_neutral(node, key)
            if not is_known:
                near = difflib.get_close_matches(key, _CONSTRAINTS, n=1)
                hint = _HINTS.get(key) or (f"; did you mean {near[0]}?" if near else "")
                return f"unknown keyword at {place}/{escaped(key)}{hint}"
    return None


def drop_annotations(schema: object) -> None:
    """Takes out, in place, what binds nothing and llguidance would refuse: formats that JSON Schema does not define, and
    keywords with the value that asks for nothing."""
    for _, node in _schemas_in(schema):
        if isinstance(node.get("format"), str) and node["format"] not in _ENFORCED_FORMATS:
            del node["format"]
        for key in [key for key in node if _is_neutral(node, key)]:
            del node[key]


def _is_neutral(node: dict, key: str) -> bool:
    return any(type(node[key]) is type(one) and node[key] == one for one in _NEUTRAL.get(key, ()))


def _schemas_in(schema: object) -> Iterator[tuple[str, dict]]:
    """(JSON pointer, schema) of the schema and all below it."""
    stack = [("#", schema)]
    while stack:
        place, node = stack.pop()
        if isinstance(node, dict):
            yield place, node
            stack.extend(reversed(list(subschemas(place, node))))


def subschemas(place: str, node: dict) -> Iterator[tuple[str, object]]:
    for name in _MAPS:
        if isinstance(node.get(name), dict):
            yield from ((f"{place}/{name}/{escaped(key)}", inner) for key, inner in node[name].items())
    for name in _SCHEMAS:
        inner = node.get(name)
        if isinstance(inner, list):
            yield from ((f"{place}/{name}/{index}", one) for index, one in enumerate(inner))
        else:
            yield f"{place}/{name}", inner


def escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
