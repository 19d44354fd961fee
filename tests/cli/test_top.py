"""`jserve top`: shares and rates between two looks, the panel, and one look for a pipe."""

from __future__ import annotations

import io
import json
from collections import deque

import pytest
from rich.console import Console

from jserve.cli import main as cli
from jserve.cli import top
from jserve.proto_gen import control_pb2
from tests.support.grpc_server import server_process

NAMES = [field.name for field in control_pb2.GetLoadsResponse.DESCRIPTOR.fields]


def look(at, **values):
    return top.Look(at, {**dict.fromkeys(NAMES, 0), **values})


def test_rates_and_shares_are_over_the_time_between_two_looks():
    before = look(10.0, generated_tokens=100, scheduled_tokens=1000, padded_tokens=900, num_steps=5)
    now = look(
        12.0, generated_tokens=300, scheduled_tokens=1090, padded_tokens=910, num_steps=15, num_running=8, num_waiting=3,
        kv_usage=0.25, num_cached_blocks=10, num_total_blocks=40, prefix_cache_queried_tokens=80,
        prefix_cache_hit_tokens=60, requests_length=4, requests_failed=1,
    )
    found = top.figures(before, now)
    assert (found["output_tokens_per_s"], found["steps_per_s"], found["requests_per_s"]) == (100, 5, 2)
    assert (found["padded_share"], found["prefix_cache_hit_rate"], found["cached_blocks_share"]) == (0.1, 0.75, 0.25)
    assert (found["running"], found["waiting"], found["tokens_per_step"], found["failed"]) == (8, 3, 9, 1)
    assert all(value == 0 for value in top.figures(before, before).values())


def test_the_panel_shows_them():
    before, now = look(0.0), look(1.0, generated_tokens=1234, num_running=7, kv_usage=0.5)
    stream = io.StringIO()
    panel = top.render(top.figures(before, now), "m on h", deque([1.0, 2.0]))
    Console(file=stream, width=110).print(panel)
    text = stream.getvalue()
    for piece in ("m on h", "1,234.0", "50.0%", "running", "7", "compiles after ready"):
        assert piece in text


def test_one_look_for_a_pipe(capsys):
    with server_process() as (_, address):
        assert cli.main(["top", "--address", address, "--interval", "0.01"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["model"] == "fake-model" and answer["kv_usage"] == 0.25


def test_nobody_at_the_address_is_one_line(capsys):
    assert cli.main(["top", "--address", "127.0.0.1:1"]) == 1
    assert "UNAVAILABLE" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--interval", "0"], ["--port", "1"]])
def test_bad_flags_are_bad_usage(flags):
    assert cli.main(["top", *flags]) == 2
