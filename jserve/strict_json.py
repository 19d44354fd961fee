"""JSON in which a key stands once: of a key given twice one value would silently be ignored."""

from __future__ import annotations


def without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """For json.loads(object_pairs_hook=...).  ValueError names a key that is there twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return fields
