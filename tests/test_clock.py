"""Durations survive a clock that somebody sets."""

import re
import time
from pathlib import Path

from jserve import clock

JSERVE = Path(clock.__file__).parent
DATES = {"clock.py", "http/app.py", "http/chat.py", "http/completions.py", "tokenizer/chat_template.py"}
"""Where the time of day is a date: of a process's start, OpenAI's `created`, a chat template's today."""


def test_stamps_do_not_follow_a_clock_that_is_set(monkeypatch):
    before, wall = clock.stamp(), time.time()
    assert abs(before - wall) < 60
    monkeypatch.setattr(time, "time", lambda: wall - 3600)
    assert 0 <= clock.stamp() - before < 60


def test_no_duration_is_taken_from_the_time_of_day():
    wall_clock = re.compile(r"\btime\.time\b|\bdatetime\.(now|utcnow|today)\(|\btime\.time_ns\b")
    used_in = {path.relative_to(JSERVE).as_posix() for path in JSERVE.rglob("*.py") if wall_clock.search(path.read_text())}
    assert used_in <= DATES
