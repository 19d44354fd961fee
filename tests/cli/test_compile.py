"""`jserve compile --target`: whatever a compiler that is not ours does to its process, the user reads one line."""

from __future__ import annotations

import os

import pytest

from jserve.cli import child
from jserve.cli.child import ChildDied, call_in_child
from jserve.cli.main import main


def test_a_child_answers_raises_or_dies():
    assert call_in_child(int, "12") == 12
    with pytest.raises(ValueError, match="invalid literal") as raised:
        call_in_child(int, "x")
    assert "call_in_child" not in raised.value.__notes__[0] and "ValueError" in raised.value.__notes__[0]
    with pytest.raises(ChildDied, match="died of SIGABRT"):
        call_in_child(os.abort)
    with pytest.raises(ChildDied, match="died with status 3"):
        call_in_child(os._exit, 3)


def test_a_compiler_that_crashes_is_one_line(monkeypatch, tmp_path, capsys):
    real = child.call_in_child
    monkeypatch.setattr(child, "call_in_child", lambda function, arguments: real(os.abort))
    assert main(["compile", "--model", "unread.gguf", "--target", "tpu7x-8", "--out", str(tmp_path / "bundle")]) == 1
    assert capsys.readouterr().err.startswith("jserve compile: --target tpu7x-8: the TPU compiler")
    assert list(tmp_path.iterdir()) == []


def test_what_the_child_refuses_is_said_by_the_parent(tmp_path, capsys):
    assert main(["compile", "--model", str(tmp_path / "none.gguf"), "--target", "v1", "--out", str(tmp_path / "bundle")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jserve compile: ")
