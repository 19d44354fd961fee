"""The peers' table of docs/benchmarks.md: every measured pair, ours beside theirs, kept as JSON beside the page.

A run adds its rows; a row of the same pair, load and concurrency replaces the older one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.peers.agreement import FLOAT32_MARGIN

BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"


@dataclass(frozen=True)
class Row:
    """One pair at one concurrency; `ours` and `theirs` are medians over the rounds."""

    peer: str
    our_name: str
    load: str
    concurrency: int
    ours: float
    """Output tokens a second."""
    theirs: float
    our_ttft_ms: float
    their_ttft_ms: float
    our_tpot_ms: float | None
    their_tpot_ms: float | None
    our_ready_s: float
    their_ready_s: float
    num_rounds: int
    num_prompts: int
    agreement: Mapping[str, object] | None
    versions: str
    machine: str
    date: str

    @property
    def unexplained_nats(self) -> float | None:
        """How sure our model was where float32 tokens part from float32 tokens, if rounding does not explain it."""
        margins = (self.agreement or {}).get("margins") or (0.0,)
        both_float32 = "float32" in self.our_name and "float32" in self.peer
        return max(margins) if both_float32 and max(margins) > FLOAT32_MARGIN else None

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.peer, self.our_name, self.load, self.concurrency


def read(path: Path) -> list[Row]:
    return [Row(**fields) for fields in json.loads(path.read_text())] if path.exists() else []


def merge(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    rows = {row.key: row for row in (*old, *new)}
    return [rows[key] for key in sorted(rows)]


def write(page: Path, rows: Sequence[Row]) -> None:
    """Puts the table between the marks of the page (made where missing), and the rows beside it."""
    page.with_suffix(".json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    text = page.read_text() if page.exists() else f"# Benchmarks\n\n{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{render(rows)}\n{END}{after}")


def render(rows: Sequence[Row]) -> str:
    lines = [
        "| load | concurrent | jserve tok/s | peer tok/s | ratio | TTFT ms (ours, theirs) | TPOT ms (ours, theirs) |"
        " start to ready s (ours, theirs) | equal outputs |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    pair = None
    for row in rows:
        if pair != (row.peer, row.our_name):
            pair = row.peer, row.our_name
            lines.append(f"| **{row.our_name} against {row.peer}** | | | | | | | | |")
        ratio = f"{row.ours / row.theirs:.2f}x" if row.theirs else "-"
        lines.append(
            f"| {row.load} | {row.concurrency} | {row.ours:.1f} | {row.theirs:.1f} | {ratio}"
            f" | {row.our_ttft_ms:.0f}, {row.their_ttft_ms:.0f} | {_ms(row.our_tpot_ms)}, {_ms(row.their_tpot_ms)}"
            f" | {row.our_ready_s:.1f}, {row.their_ready_s:.1f} | {_agreement(row.agreement)} |"
        )
    notes = sorted({f"{row.peer}: {row.versions}; {row.machine}; {row.date}" for row in rows})
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)])


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _agreement(found: Mapping[str, object] | None) -> str:
    if found is None:
        return "no ids told"
    text = f"{found['num_equal']} of {found['num_requests']}"
    if found["margins"]:
        text += f"; first differences where the choice is within {max(found['margins']):.2g} nats"
    return text
