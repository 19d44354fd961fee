"""Typed access to the settings that checkpoints carry: whatever somebody wrote there, a ModelError names the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class ModelError(ValueError):
    """A model that cannot be served; the message names the setting and its value."""


def required(values: Mapping[str, Any], key: str) -> Any:
    if values.get(key) is None:
        raise ModelError(f"{key} is missing")
    return values[key]


def size(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """An integer of at least 1; a missing one or null is `default`."""
    value = values.get(key)
    if value is None:
        value = required(values, key) if default is None else default
    return check_size(key, value)


def check_size(key: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{key} = {value!r}: must be a whole number of at least 1")
    return value


def number(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A finite number above 0."""
    value = required(values, key) if default is None else values.get(key, default)
    if not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ModelError(f"{key} = {value!r}: must be a number above 0")
    return float(value)


def token_ids(values: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """One id, a list of ids, or null."""
    value = values.get(key)
    ids = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not all(isinstance(token_id, int) for token_id in ids):
        raise ModelError(f"{key} = {value!r}: must be token ids")
    return ids


def mapping(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object; a missing one or null is empty."""
    value = values.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ModelError(f"{key} = {value!r}: must be an object")
    return value or {}
