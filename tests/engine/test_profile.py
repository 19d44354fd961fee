"""Traces of jax.profiler: one at a time, stopped by hand or after so many steps, a file that a viewer opens."""

from __future__ import annotations

import gzip
import json
import threading
import time
from pathlib import Path

import pytest

from jserve.engine.profile import Profiler
from jserve.request import Code, RequestError


def refused(function, *arguments) -> Code:
    with pytest.raises(RequestError) as refusal:
        function(*arguments)
    return refusal.value.code


def trace_events(folder: Path) -> list:
    (path,) = folder.rglob("*.trace.json.gz")
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


@pytest.mark.timeout(300)
def test_a_trace_is_written_one_at_a_time_and_stops_by_itself(tmp_path):
    import jax.numpy as jnp

    steps = [0]
    profiler = Profiler(tmp_path / "default", lambda: steps[0])
    assert refused(profiler.stop) is Code.FAILED_PRECONDITION
    assert refused(profiler.start, None, 0) is Code.INVALID_ARGUMENT
    (tmp_path / "file").touch()
    assert refused(profiler.start, str(tmp_path / "file" / "x")) is Code.INVALID_ARGUMENT

    folder = Path(profiler.start(str(tmp_path / "mine")))
    assert refused(profiler.start) is Code.FAILED_PRECONDITION
    (jnp.ones((64, 64)) @ jnp.ones((64, 64))).block_until_ready()
    assert Path(profiler.stop()) == folder == tmp_path / "mine"
    assert len(trace_events(folder)) > 10

    folder = Path(profiler.start(None, 3))
    assert folder.parent == tmp_path / "default"
    steps[0] = 2
    time.sleep(0.05)
    assert refused(profiler.start) is Code.FAILED_PRECONDITION
    steps[0] = 3
    for thread in threading.enumerate():
        if thread.name == "jserve-profile":
            thread.join(30)
    assert trace_events(folder) and refused(profiler.stop) is Code.FAILED_PRECONDITION
    profiler.close()
