import subprocess
import sys

import pytest

from jserve.cli import main as cli
from jserve.cli.command import Command
from jserve.config import ConfigError
from jserve.request import Code, RequestError


def fetch_that(monkeypatch, run):
    """`jserve fetch` with another run()."""
    from jserve.cli import fetch

    monkeypatch.setattr(fetch, "COMMAND", Command("", "does", lambda parser: None, run))


def raising(error):
    def run(arguments):
        raise error

    return run


@pytest.mark.parametrize(
    "argv, code",
    [
        ([], 2),
        (["--help"], 0),
        (["--version"], 0),
        (["fetsch"], 2),
        (["fetch"], 2),
        (["fetch", "--help"], 0),
        (["plan"], 2),
        (["replay", "no-such-file"], 1),
        (["convert"], 2),
        (["bench"], 2),
        (["bench", "--help"], 0),
        (["bench", "latencyy"], 2),
        (["bench", "latency", "--help"], 0),
        (["serve", "--prot", "1"], 2),
        (["serve", "--port", "70000"], 2),
        (["serve", "--model", "no-such-model", "--kv.memory_fraction", "1.5"], 2),
        (["generate", "x", "--kv.block_size", "0"], 2),
        (["generate", "x", "--config", "no-such-file.toml"], 2),
        (["generate", "x", "--bundle", "no-such-folder"], 2),
        (["generate", "x", "--deterministic", "--tp", "2"], 2),
        (["generate", "x", "--compile.token_buckets", "16,9999"], 2),
        (["serve", "--auth-file", "no-such-file"], 2),
        (["plan", "--model", "llama-3-8b", "--device", "v5e"], 2),
        (["batch", "-i", "no-such-file", "-o", "-", "--dtype", "float64"], 2),
    ],
)
def test_exit_codes(capsys, argv, code):
    assert cli.main(argv) == code
    output = capsys.readouterr()
    assert output.out or output.err


@pytest.mark.parametrize("command", [*cli.COMMANDS, "bench throughput", "bench latency", "bench startup"])
def test_every_command_explains_itself(capsys, command):
    assert cli.main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: jserve {command} ")
    assert max(map(len, text.splitlines())) <= 120


def test_a_misspelt_command_is_answered_with_the_nearest(capsys):
    cli.main(["generte"])
    assert "did you mean generate?" in capsys.readouterr().err
    cli.main(["bench", "throughputs"])
    assert "did you mean throughput?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error, line",
    [
        (ConfigError("kv.block_size = 0:\n must be at least 1"), "kv.block_size = 0: must be at least 1"),
        (
            RequestError(Code.INVALID_ARGUMENT, "top_p = 2: must be in (0, 1]"),
            "INVALID_ARGUMENT: top_p = 2: must be in (0, 1]",
        ),
        (PermissionError(13, "Permission denied", "/x"), "Permission denied: /x"),
    ],
)
def test_what_a_person_can_mend_is_one_line(monkeypatch, capsys, error, line):
    fetch_that(monkeypatch, raising(error))
    assert cli.main(["fetch"]) == 1
    assert capsys.readouterr().err == f"jserve fetch: {line}\n"


def test_errors_of_checkpoints_and_tokenizers_are_one_line(monkeypatch, capsys):
    from jserve.tokenizer import TokenizerError
    from jserve.weights.errors import WeightsError

    for error in (WeightsError("model.safetensors: too short"), TokenizerError("no tokenizer")):
        fetch_that(monkeypatch, raising(error))
        assert cli.main(["fetch"]) == 1
        assert capsys.readouterr().err == f"jserve fetch: {error}\n"


def test_debug_shows_the_traceback(monkeypatch, capsys):
    fetch_that(monkeypatch, raising(ConfigError("bad")))
    assert cli.main(["fetch", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_bug_shows_its_traceback_and_says_that_it_is_one(monkeypatch, capsys):
    fetch_that(monkeypatch, raising(ZeroDivisionError("x")))
    assert cli.main(["fetch"]) == 1
    error = capsys.readouterr().err
    assert "ZeroDivisionError" in error and "bug" in error


def test_ctrl_c_exits_130_without_a_traceback(monkeypatch, capsys):
    fetch_that(monkeypatch, raising(KeyboardInterrupt()))
    assert cli.main(["fetch"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_help_loads_neither_jax_nor_grpc():
    code = "import sys; from jserve.cli.main import main; main(['serve', '--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not {"jax", "grpc", "rich"} & set(done.stdout.splitlines()[-1].split())


def test_a_reader_that_leaves_ends_the_command_quietly():
    command = f"{sys.executable} -m jserve.cli.main serve --help-all | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stderr == "" and done.stdout.startswith("usage: jserve serve")
