"""`jserve bench serve` and `compare` as a person runs them, against a server process around a scripted engine."""

from __future__ import annotations

import json

import pytest

from jserve.cli import main as cli
from tests.support.grpc_server import server_process

SMALL = ["--num-prompts", "6", "--input-len", "8", "--output-len", "3"]
ANYWAY = ["--max-client-lag-ms", "inf"]
"""Whether the machine of the tests keeps up is not what these ask."""


@pytest.fixture(scope="module")
def address():
    with server_process("--step-s", "0.005") as (_, address):
        yield address


def served(address, *flags) -> int:
    return cli.main(["bench", "serve", "--address", address, *SMALL, *flags])


def test_a_run_prints_saves_and_draws_and_two_are_compared(address, tmp_path, capsys):
    flags = ["--max-concurrency", "3", "--save-result", "--result-dir", str(tmp_path), "--save-detailed", *ANYWAY]
    flags += ["--goodput", "ttft:60000", "e2el:60000"]
    assert served(address, *flags, "--plot", str(tmp_path / "run.html")) == 0
    text = capsys.readouterr().out
    for label in ("Serving Benchmark Result", "Successful requests:", "Request goodput (req/s):", "P99 ITL (ms):"):
        assert label in text
    assert "<svg" in (tmp_path / "run.html").read_text()
    assert served(address, *flags, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    saved = sorted(tmp_path.glob("*.json"))
    assert len(saved) == 2 and printed["output_lens"] == [3] * 6 and printed["mode"] == "serve"
    assert printed["max_concurrency"] == 3 and printed["good_requests"] == 6 and len(printed["output_token_ids"]) == 6
    assert cli.main(["bench", "compare", *map(str, saved)]) == 0
    assert "Output token throughput (tok/s)" in capsys.readouterr().out
    assert cli.main(["bench", "compare", str(saved[0]), str(tmp_path / "none.json")]) == 1
    named = ["--result-filename", "mine.json", "--label", "today", "--metadata", "version=3", "completed=0"]
    assert served(address, *flags, *named) == 0 == served(address, *flags, *named)
    mine = json.loads((tmp_path / "mine.json").read_text())
    assert (mine["label"], mine["version"], mine["completed"]) == ("today", "3", 6), "a figure is no metadata's"


def test_a_client_that_lags_reports_nothing(address, capsys):
    assert served(address, "--max-client-lag-ms", "0") == 1
    out = capsys.readouterr()
    assert out.out == "" and "no report: the client" in out.err


def test_a_sweep_over_concurrency(address, tmp_path, capsys):
    flags = ["--sweep", "concurrency:1,3", "--slo", "ttft:60000", "tpot:60000", "--plot", str(tmp_path / "s.html")]
    assert served(address, *flags, *ANYWAY, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert [point["concurrency"] for point in answer["points"]] == [1, 3] and answer["highest_within_slo"] == 3
    assert answer["points"][0]["seed"] != answer["points"][1]["seed"], "no point finds an earlier one's prompts cached"
    assert "<svg" in (tmp_path / "s.html").read_text()
    flags[-1] = str(tmp_path / "s.svg")
    assert served(address, *flags, *ANYWAY) == 0
    assert (tmp_path / "s.svg").read_text().startswith("<svg xmlns=")


def test_requests_of_a_file_and_of_a_trace(address, tmp_path, capsys):
    requests, trace = tmp_path / "r.jsonl", tmp_path / "t.csv"
    requests.write_text('{"prompt": "one", "output_tokens": 2}\n\n{"messages": [{"role": "user", "content": "hi"}],'
                        ' "sampling_params": {"max_tokens": 4}}\n')
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.5,5,2\n2023-11-16 18:15:46.6,7,4\n")
    for name, path in (("jsonl", requests), ("trace", trace)):
        command = ["bench", "serve", "--address", address, "--dataset-name", name, "--dataset-path", str(path)]
        assert cli.main([*command, *ANYWAY, "--json", "--save-detailed"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["output_lens"] == [2, 4] and answer["dataset_name"] == name
    starts = answer["start_times"]
    assert starts[0] < starts[1]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--ramp-up-strategy", "linear"], "go together"),
        (["--slo", "ttft:3"], "--slo needs --sweep"),
        (["--sweep", "rate:auto"], "needs --slo"),
        (["--sweep", "speed:1"], "expected rate:1,2,4"),
        (["--request-rate", "0"], "expected a number above 0"),
        (["--model", "m"], "has no meaning with --backend jserve"),
        (["--token-ids", "9"], "expected two ids"),
        (["--metadata", "x"], "expected KEY=VALUE"),
    ],
)
def test_bad_flags_are_bad_usage(capsys, flags, message):
    assert cli.main(["bench", "serve", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, code, message",
    [
        (["--dataset-name", "trace"], 2, "needs --dataset-path"),
        (["--dataset-path", "x"], 2, "has no meaning with --dataset-name random"),
        (["--input-len", "5000"], 1, "the model's context is 4096"),
    ],
)
def test_loads_that_cannot_be_are_one_line(address, capsys, flags, code, message):
    assert cli.main(["bench", "serve", "--address", address, *flags]) == code
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_nobody_at_the_address_is_one_line(capsys):
    assert cli.main(["bench", "serve", "--address", "127.0.0.1:1"]) == 1
    assert "UNAVAILABLE" in capsys.readouterr().err.splitlines()[-1]
