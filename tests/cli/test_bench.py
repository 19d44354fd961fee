import json

import pytest

from jserve.bench import startup
from jserve.cli import bench
from jserve.cli import main as cli
from jserve.weights import fetch
from tests.support.in_process import InProcessEngine, start_with

SMALL = ["--num-prompts", "4", "--input-len", "8", "--output-len", "3"]


@pytest.fixture
def engine(monkeypatch):
    return start_with(InProcessEngine(), monkeypatch, bench)


def test_throughput_prints_the_table_and_latency_more_percentiles(capsys, engine):
    assert cli.main(["bench", "throughput", *SMALL, "--max-concurrency", "2"]) == 0
    text = capsys.readouterr().out
    assert "Throughput Benchmark Result" in text and "Output token throughput (tok/s):" in text
    assert cli.main(["bench", "latency", *SMALL]) == 0
    assert "P10 TTFT (ms):" in capsys.readouterr().out
    assert engine.closed


def test_json_and_a_saved_file_hold_the_same_report(tmp_path, capsys, engine):
    flags = ["--json", "--save-result", "--result-dir", str(tmp_path / "results"), "--save-detailed", "--seed", "7"]
    assert cli.main(["bench", "throughput", *SMALL, *flags]) == 0
    printed = json.loads(capsys.readouterr().out)
    (saved,) = (tmp_path / "results").iterdir()
    assert json.loads(saved.read_text()) == printed
    assert printed["output_lens"] == [3] * 4 and printed["seed"] == 7


def test_a_failed_request_is_counted_and_fails_the_command(capsys, engine):
    engine.max_waiting = 0
    assert cli.main(["bench", "throughput", *SMALL, "--num-warmups", "0", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["errors"] == {"RESOURCE_EXHAUSTED": 4}


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--num-prompts", "0"], "expected an integer of at least 1"),
        (["--random-range-ratio", "2"], "expected a number of at least 0 and at most 1"),
        (["--metric-percentiles", "101"], "expected a number of at least 0 and at most 100"),
        (["--percentile-metrics", "ttft,x"], "expected some of ttft,tpot,itl,e2el"),
        (["--dataset-name", "x"], "invalid choice"),
        (["--goodput", "speed:3"], "expected some of ttft,tpot,itl,e2el"),
        (["--request-rate", "3"], "unknown flag --request-rate"),
    ],
)
def test_bad_flags_are_bad_usage(capsys, engine, flags, message):
    assert cli.main(["bench", "throughput", *flags]) == 2
    assert message in capsys.readouterr().err


def test_what_cannot_fit_the_context_is_one_line(capsys, engine):
    assert cli.main(["bench", "latency", "--input-len", "5000"]) == 1
    assert "the model's context is 4096" in capsys.readouterr().err.splitlines()[-1]
    assert engine.closed


def test_startup_reports_cold_and_the_median_of_warm(monkeypatch, capsys, tmp_path):
    """The children are scripted: cold 20 s, warm 5, 3 and 4 s."""
    commands = []
    seconds = iter([20.0, 5.0, 3.0, 4.0])

    def start(flags):
        commands.append(flags)
        ready = next(seconds)
        return {
            "ready_s": ready,
            "first_token_s": ready + 1,
            "phases_s": {"compile": ready - 1},
            "compiles_after_ready": 0,
            "model_id": "m",
            "about": {"device": "cpu"},
        }

    monkeypatch.setattr(startup, "_start", start)
    (tmp_path / "m.gguf").write_bytes(b"x")
    model = str(tmp_path / "m.gguf")
    assert cli.main(["bench", "startup", "--model", model, "--no-overlap", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["cold_ready_s"] == 20 and figures["warm_ready_s"] == 4 and figures["warm_first_token_s"] == 5
    assert figures["cold_phases_s"] == {"compile": 19} and figures["mode"] == "startup"
    assert len(commands) == 4 and len({tuple(command) for command in commands}) == 1, "one cache for all"
    assert "--scheduler.overlap=false" in commands[0] and "--compile.cache_dir" in commands[0]


def test_a_start_that_fails_is_one_line(monkeypatch, capsys, tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"x")
    monkeypatch.setattr(fetch, "locate", lambda name, cache_dir, report: tmp_path / "m.gguf")
    assert cli.main(["bench", "startup", "--num-warm", "0"]) == 1
    assert "m.gguf" in capsys.readouterr().err.splitlines()[-1]


def test_the_child_prints_timestamps_only(capsys, engine):
    assert cli.main(["bench", "startup", "--child"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["began_at"] <= answer["ready_at"] <= answer["first_token_at"]
    assert answer["model_id"] == "fake-model" and answer["compiles_after_ready"] == 0
