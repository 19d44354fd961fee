"""Random JSON schemas whose texts are short, so that a model of random weights ends them too."""

from __future__ import annotations

import random
from typing import Any


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """An object at the top; inside it whatever comes, at most `depth` levels deep."""
    names = rng.sample(["id", "name", "tags", "size", "ok", "x-y", "caf\u00e9", "a b"], rng.randrange(1, 4))
    required = [name for name in names if rng.random() < 0.7]
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _value(rng, depth - 1) for name in names},
        "required": required,
        "additionalProperties": False,
    }
    return schema


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    makers = [_string, _integer, _number, _constant, _boolean, _union]
    if depth > 0:
        makers += [_array, random_schema]
    return rng.choice(makers)(rng, depth)


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice([
        {"type": "string", "maxLength": rng.randrange(0, 6)},
        {"type": "string", "minLength": 2, "maxLength": 4},
        {"type": "string", "pattern": "^[a-f]{2,4}(-[0-9]{1,2})?$"},
        {"type": "string", "format": "date"},
        {"type": "string", "enum": ["red", "gr\u00fcn", 'quo"ted', "back\\slash"]},
    ])


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(0, 900)}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "number", "exclusiveMinimum": 0, "maximum": 1, "enum": [0.25, 0.5, 1]} if rng.random() < 0.5 else {
        "enum": [1.5, -2, 1e3]
    }


def _constant(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice([None, "fixed", 7, [1, "two"], {"k": True}])}


def _boolean(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_integer(rng, 0), {"type": "null"}, {"type": "string", "maxLength": 3}]}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(0, 2)
    return {"type": "array", "items": _value(rng, depth - 1), "minItems": low, "maxItems": low + rng.randrange(1, 3)}
