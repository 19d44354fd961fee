"""`jserve serve` as a process of its own, over a scripted engine."""

import io
import signal
import socket
import subprocess
import sys
import textwrap

import pytest

from jserve.cli import main as cli
from jserve.cli import serve
from jserve.config import Config
from jserve.server.client import Client
from tests.support.fake_engine import whole_text

SCRIPT = textwrap.dedent("""
    import sys
    from jserve.cli import main, serve
    from tests.support.in_process import InProcessEngine

    async def start_engine(config, report):
        report.line("weights: 1 GiB")
        report.progress("compile", 1, 1)
        return InProcessEngine(step_s={step_s})

    serve.start_engine = start_engine
    sys.exit(main.main(["serve", "--port", "0"]))
""")


@pytest.fixture
def start(repository_root):
    """Starts a server; gives (process, address, lines up to the ready one)."""
    processes = []

    def start(step_s: float = 0.0):
        command = [sys.executable, "-c", SCRIPT.format(step_s=step_s)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=repository_root)
        processes.append(process)
        lines = []
        while not lines or not lines[-1].startswith("try: "):
            line = process.stderr.readline()
            assert line, lines
            lines.append(line.strip())
        return process, lines[-1].split()[-1], lines

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_the_line_to_try_names_what_a_client_has_to_show():
    section = Config().replace("server", tls_cert="c", tls_key="k", auth_file="a")
    assert serve._access_flags(Config()) == ""
    assert serve._access_flags(section) == " --tls-ca CA.pem --token-file FILE"


def test_the_start_is_told_and_ends_with_the_line_to_try(start):
    _, address, lines = start()
    assert lines[0] == "weights: 1 GiB" and lines[1].startswith("compile: 1 in ")
    assert lines[-2].startswith("ready after ") and address in lines[-2]
    assert lines[-1] == f"try: jserve chat --address {address}"
    with Client(address) as client:
        assert client.is_serving()


def test_chat_uses_the_running_server(start, monkeypatch, capsys):
    _, address, _ = start()
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nagain\n"))
    assert cli.main(["chat", "--address", address, "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out == f"{whole_text(2)}\n{whole_text(2)}\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_0(start, number):
    process, _, _ = start()
    process.send_signal(number)
    assert process.wait(timeout=20) == 0
    assert "Traceback" not in process.stderr.read()


def test_a_port_in_use_and_an_open_host_are_one_line(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert cli.main(["serve", "--port", str(taken.getsockname()[1])]) == 1
    error = capsys.readouterr().err
    assert "already in use" in error and len(error.splitlines()) == 1
    assert cli.main(["serve", "--host", "0.0.0.0"]) == 2
    assert "--insecure" in capsys.readouterr().err
