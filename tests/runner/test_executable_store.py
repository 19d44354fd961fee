"""Executables kept on disk: found again, never in place of another program, compiled again where damaged."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jserve.runner import executable_store
from jserve.runner.compiler import compile_all
from jserve.runner.executable_store import ExecutableStore, fingerprint


def double(x):
    return 2 * x


@pytest.fixture
def lowered():
    """A job that counts how often it is asked to lower."""
    calls = []

    def lower():
        calls.append(1)
        return jax.jit(double).lower(jax.ShapeDtypeStruct((4,), jnp.float32))

    lower.calls = calls
    return lower


def make(lowered, store):
    (program,) = compile_all({"double": lowered}, 1, lambda done, total: None, store).values()
    return program(jnp.arange(4.0)).tolist()


def test_a_second_start_lowers_nothing_and_computes_the_same(tmp_path, lowered):
    assert make(lowered, ExecutableStore(tmp_path, "key")) == [0, 2, 4, 6]
    assert make(lowered, ExecutableStore(tmp_path, "key")) == [0, 2, 4, 6]
    assert len(lowered.calls) == 1


def test_another_fingerprint_finds_nothing(tmp_path, lowered):
    make(lowered, ExecutableStore(tmp_path, "key"))
    make(lowered, ExecutableStore(tmp_path, "other"))
    assert len(lowered.calls) == 2


def test_a_damaged_file_is_compiled_again(tmp_path, lowered):
    make(lowered, ExecutableStore(tmp_path, "key"))
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    file.write_bytes(file.read_bytes()[:100])
    assert make(lowered, ExecutableStore(tmp_path, "key")) == [0, 2, 4, 6]
    assert len(lowered.calls) == 2


def test_a_folder_that_cannot_be_written_costs_nothing_but_time_and_is_said_once(tmp_path, lowered, caplog):
    (tmp_path / "file").write_text("")
    store = ExecutableStore(tmp_path / "file", "key")
    for _ in range(3):
        assert make(lowered, store) == [0, 2, 4, 6]
    assert caplog.text.count("cannot be kept in") == 1 and "another folder: --cache-dir" in caplog.text


def test_old_sets_go_when_there_are_too_many(tmp_path, lowered, monkeypatch):
    monkeypatch.setattr(executable_store, "MOST_SETS", 2)
    for key in ("a", "b", "c"):
        make(lowered, ExecutableStore(tmp_path, key))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "c"]


def test_the_fingerprint_depends_on_every_fact():
    facts = {"jax": "1", "device": "cpu"}
    assert fingerprint(facts) == fingerprint(dict(reversed(facts.items())))
    others = [{"jax": "1"}, {"jax": "2", "device": "cpu"}, {"jax": "cpu", "device": "1"}, {**facts, "flags": ""}]
    assert len({fingerprint(one) for one in [facts, *others]}) == 5
