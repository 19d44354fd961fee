"""The auth file: what it may say, that tokens are compared in constant time, that it is read again."""

import hmac
import logging

import pytest

from jserve.access import auth_file as module
from jserve.access.auth_file import Limits, read_auth_file
from jserve.access.reloaded import Reloaded
from jserve.config import ConfigError
from tests.support.auth import BLUE, RED, ROOT, auth_file, entry

DIGEST = "ab" * 32


def test_tokens_tenants_roles_and_limits(tmp_path):
    table = read_auth_file(auth_file(tmp_path, """
[tenant.red]
max_running = 2
max_waiting = 0
tokens_per_minute = 600
[default]
max_running = 9
"""))
    assert [(token.tenant, token.is_admin) for token in map(table.find, (RED, BLUE, ROOT))] == [
        ("red", False), ("blue", False), ("ops", True)]
    assert table.find("red-token") is table.find("") is table.find(RED + "\ud800") is None
    assert table.limits_of("red") == Limits(2, 0, 600)
    assert table.limits_of("blue") == Limits(max_running=9)


@pytest.mark.parametrize("text, message", [
    ("[[token", r"not valid TOML \(at "),
    ("[tokens]", "unknown key 'tokens'; known: token, tenant, default"),
    ("token = 1", r"tokens are \[\[token\]\] sections"),
    ('[[token]]\ntenant = "a"', r"\[\[token\]\] number 1: sha256 must be the 64 hex digits"),
    (f'[[token]]\nsha256 = "{DIGEST}"', "tenant = None: must be 1 to 64 printable"),
    (f'[[token]]\nsha256 = "{DIGEST}"\ntenant = "a b"', "must be 1 to 64 printable"),
    (f'[[token]]\nsha256 = "{DIGEST}"\ntenant = "a"\nrole = "boss"', "role = 'boss': only 'admin' is known"),
    (f'[[token]]\nsha256 = "{DIGEST}"\ntenant = "a"\ntoken = "x"', "unknown key 'token'"),
    (f'[[token]]\nsha256 = "{DIGEST}"\ntenant = "a"\n' * 2, "the same sha256 stands there twice"),
    ("[tenant.a]\nmax_running = 0", "max_running = 0: must be an integer of 1 or more"),
    ("[tenant.a]\nmax_runing = 1", "unknown key 'max_runing'"),
    ("[default]\ntokens_per_minute = 1.5", "tokens_per_minute = 1.5: must be an integer"),
])
def test_what_is_wrong_is_said_without_a_hash(tmp_path, text, message):
    path = auth_file(tmp_path, tokens=text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_auth_file(path)
    assert str(caught.value).startswith(f"server.auth_file = {path!r}: ")
    assert DIGEST not in str(caught.value)


def test_a_file_that_is_not_there_is_said():
    with pytest.raises(ConfigError, match="server.auth_file = '/nowhere/auth.toml': No such file"):
        read_auth_file("/nowhere/auth.toml")


def test_every_look_compares_with_every_hash_by_compare_digest(tmp_path, monkeypatch):
    """The time of a look tells neither whether nor where there is a match: no early exit, no comparison of our own."""
    table = read_auth_file(auth_file(tmp_path))
    compared = []

    class Counting:
        @staticmethod
        def compare_digest(left, right):
            compared.append((len(left), len(right)))
            return hmac.compare_digest(left, right)

    monkeypatch.setattr(module, "hmac", Counting)
    for presented in (RED, BLUE, ROOT, "", "x" * 100_000):
        compared.clear()
        table.find(presented)
        assert compared == [(32, 32)] * 3


def test_a_changed_file_counts_at_once_and_a_broken_one_does_not(tmp_path, caplog):
    path = auth_file(tmp_path)
    table = Reloaded([path], lambda: read_auth_file(path))
    assert table.current() is table.current()
    auth_file(tmp_path, tokens=entry("new", "red"))
    assert table.current().find("new") and not table.current().find(RED)
    with caplog.at_level(logging.ERROR):
        auth_file(tmp_path, tokens="[[token]")
        assert table.current().find("new")
        assert table.current().find("new")
    assert caplog.text.count("what was read before stays in force") == 1, "said once, not at every call"
    (tmp_path / "auth.toml").unlink()
    assert table.current().find("new")
    auth_file(tmp_path)
    assert table.current().find(RED) and not table.current().find("new")
