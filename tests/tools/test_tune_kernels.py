"""The tuner, tiny and on CPU: what it writes is what the kernels read; what is not there leaves their defaults."""

import json
import subprocess
import sys

import pytest

from pallas_kernels.paged_attention import layout, tuned
from pallas_kernels.paged_attention.xla import TILES, Tiles

LAYOUT = layout("cpu", 3, 64, 32, "float32")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    tuned.read.cache_clear()
    yield tmp_path
    tuned.read.cache_clear()


def test_a_device_that_was_never_tuned_keeps_the_defaults(folder):
    assert tuned.tuned(TILES, "xla", LAYOUT) == TILES
    assert tuned.device_kind("tpu") is None
    assert tuned.tuned(TILES, "xla", layout("tpu", 3, 64, 32, "float32")) == TILES


def test_tuned_sizes_count_for_their_own_shape_only(folder):
    tuned.write("cpu", {tuned.key("xla", LAYOUT): {"decode_rows": 4}}, {"jax": "1"})
    tuned.write("cpu", {tuned.key("xla", layout("cpu", 8, 128, 32, "float32")): {"chunk_keys": 128}}, {"jax": "2"})
    assert tuned.tuned(TILES, "xla", LAYOUT) == Tiles(decode_rows=4)
    assert tuned.tuned(TILES, "xla", layout("cpu", 8, 128, 32, "float32")) == Tiles(chunk_keys=128)
    assert tuned.tuned(TILES, "xla", layout("cpu", 8, 128, 16, "float32")) == TILES
    assert json.loads((folder / "cpu.json").read_text())["jax"] == "2"


def test_file_names_say_the_device():
    assert tuned.path_of("TPU v6 lite").name == "tpu_v6_lite.json"
    assert tuned.path_of("NVIDIA H200 (SXM)").name == "nvidia_h200_sxm.json"


def test_a_rehearsal_tunes_on_cpu_and_writes_sizes_that_are_read(repository_root, folder):
    command = [sys.executable, str(repository_root / "tools" / "tune_kernels.py"), "--rehearse", "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    for size in ("decode_rows", "decode_keys", "chunk_rows", "chunk_keys"):
        assert f"xla 3x64 float32 block 32: {size} = " in done.stdout
    written = json.loads((folder / "cpu.json").read_text())
    assert written["device"] == "cpu" and written["rehearsal"] is True
    assert isinstance(tuned.tuned(TILES, "xla", LAYOUT), Tiles)
    refused = subprocess.run(command[:3], capture_output=True, text=True, timeout=100)
    assert refused.returncode == 2 and "--rehearse needs --out" in refused.stderr
