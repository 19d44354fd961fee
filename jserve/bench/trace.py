"""Traces: when requests came and how long they were, from a file that somebody recorded.

JSON lines or CSV with a header, under the names of the public ones (Azure, BurstGPT, Mooncake) or ours.
"""

from __future__ import annotations

import csv
import datetime
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jserve.config import ConfigError

PROMPT_KEYS = (
    "prompt_tokens", "input_len", "prompt_len", "input_length", "ContextTokens", "Request tokens", "num_prefill_tokens",
)
OUTPUT_KEYS = (
    "output_tokens", "output_len", "completion_tokens", "output_length", "GeneratedTokens", "Response tokens",
    "num_decode_tokens",
)
ARRIVAL_KEYS = ("arrival", "arrival_s", "timestamp", "TIMESTAMP", "Timestamp", "arrived_at")
HASH_BLOCK = 512
"""Prompt tokens of one entry of `hash_ids` in Mooncake's traces; their times are milliseconds."""


@dataclass(frozen=True)
class TraceRow:
    prompt_tokens: int
    output_tokens: int
    start_s: float | None
    """Seconds after the first request; None where the trace has no times."""
    hash_ids: tuple[int, ...] = ()
    """Equal ids in equal places: equal blocks of 512 prompt tokens."""


def read(path: str | Path) -> list[TraceRow]:
    """The rows in the order of their times, or of the file where it has none.

    Raises:
      ConfigError: naming file, line and what was expected.
    """
    rows = []
    for number, fields in _lines(Path(path)):
        try:
            rows.append(_row(fields))
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{path}:{number}: {error}; expected a line such as"
                ' {"prompt_tokens": 120, "output_tokens": 64, "arrival": 0.5}'
            ) from None
    if not rows:
        raise ConfigError(f"{path}: holds no request")
    if any(row.start_s is None for row in rows):
        return [replace(row, start_s=None) for row in rows]
    rows.sort(key=lambda row: row.start_s)
    unit = 1e-3 if any(row.hash_ids for row in rows) else 1.0
    begin = rows[0].start_s
    return [replace(row, start_s=unit * (row.start_s - begin)) for row in rows]


def _lines(path: Path):
    """(line number, fields) of every line; a value that cannot be read stands for the error itself."""
    text = path.read_text()
    if text.lstrip()[:1] not in ("{", "[", ""):
        for number, fields in enumerate(csv.DictReader(io.StringIO(text)), 2):
            yield number, {key: _number(value) for key, value in fields.items()}
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                yield number, error


def _row(fields: object) -> TraceRow:
    if isinstance(fields, ValueError):
        raise fields
    if not isinstance(fields, Mapping):
        raise ValueError("not an object")

    def find(keys: Sequence[str], default=None):
        return next((fields[key] for key in keys if key in fields), default)

    prompt, output, arrival = find(PROMPT_KEYS), find(OUTPUT_KEYS, 1), find(ARRIVAL_KEYS)
    for name, value in (("prompt_tokens", prompt), ("output_tokens", output)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} = {value!r}")
    return TraceRow(prompt, output, _seconds(arrival), tuple(find(("hash_ids",), ())))


def _seconds(arrival: object) -> float | None:
    if isinstance(arrival, str):
        return datetime.datetime.fromisoformat(arrival).timestamp()
    return None if arrival is None else float(arrival)


def _number(text: str | None) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except (TypeError, ValueError):
            pass
    return text
