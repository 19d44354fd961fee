"""`jserve token` and the flags that use what it makes."""

import io
import json

import pytest

from jserve.access.auth_file import read_auth_file
from jserve.cli import main as cli
from tests.support.auth import auth_file
from tests.support.certificates import Authority
from tests.support.fake_engine import whole_text
from tests.support.grpc_server import server_process


def test_its_stderr_is_an_auth_file_for_its_stdout(tmp_path, capsys):
    assert cli.main(["token", "red"]) == 0
    red = capsys.readouterr()
    assert cli.main(["token", "ops", "--admin"]) == 0
    ops = capsys.readouterr()
    table = read_auth_file(auth_file(tmp_path, tokens=red.err + ops.err))
    for made, tenant, is_admin in ((red, "red", False), (ops, "ops", True)):
        token = table.find(made.out.strip())
        assert (token.tenant, token.is_admin) == (tenant, is_admin)
        assert len(made.out.strip()) >= 43 and made.out.strip() not in made.err
    assert red.out != ops.out


def test_json_and_refusals(capsys):
    assert cli.main(["token", "red", "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == {"token", "sha256", "tenant", "role"}
    assert cli.main(["token", "a b"]) == 2
    assert "printable ASCII" in capsys.readouterr().err


def test_chat_with_a_server_that_wants_tls_and_a_token(tmp_path, capsys, monkeypatch):
    authority = Authority(tmp_path)
    cert, key = authority.issue("server")
    cli.main(["token", "red"])
    made = capsys.readouterr()
    (tmp_path / "red.token").write_text(made.out)
    arguments = ["--auth-file", auth_file(tmp_path, tokens=made.err), "--tls-cert", cert, "--tls-key", key]
    with server_process(*arguments) as (process, address):
        assert process.stdout.readline().startswith("ready ")
        command = ["chat", "--address", address, "--tls-ca", authority.path, "--max-tokens", "3"]
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        assert cli.main([*command, "--token-file", str(tmp_path / "red.token")]) == 0
        assert capsys.readouterr().out == f"{whole_text(3)}\n"
        assert cli.main(command) == 1
        error = capsys.readouterr().err
        assert error.startswith("jserve chat: UNAUTHENTICATED: a bearer token is needed") and "--token-file" in error


@pytest.mark.parametrize("flags, message", [
    (["--token-file", "x"], "--token-file has no meaning without --address"),
    (["--address", "127.0.0.1:1", "--token-file", "/nowhere/x"], "/nowhere/x: cannot read it: No such file"),
    (["--address", "127.0.0.1:1", "--tls-cert", "x"], "--tls-cert and --tls-key go together"),
])
def test_flags_that_cannot_work_are_said(capsys, flags, message):
    assert cli.main(["chat", *flags]) == 2
    assert message in capsys.readouterr().err
