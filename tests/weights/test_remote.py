"""Models on the hub and in buckets: copied once, whole files only, and one line for everything that can be wrong."""

import json
import sys

import fsspec
import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from jserve.config import Config, ConfigError
from jserve.weights import fetch, remote
from jserve.weights.load import load_model
from tests.support.tiny_models import random_gguf

FILES = {"config.json": b"{}", "params/embedding/0.0": b"x" * 100, "model.safetensors": b"y" * 50, "old.bin": b"z"}


@pytest.fixture
def bucket(monkeypatch):
    """gs:// as a file system in memory, which counts what is read."""
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    for name, content in FILES.items():
        memory.pipe(f"/bucket/model/{name}", content)
    memory.opened = []
    plain_open = memory.open

    def counted(path, *arguments, **options):
        memory.opened.append(path.removeprefix("/bucket/model/"))
        return plain_open(path, *arguments, **options)

    monkeypatch.setattr(memory, "open", counted)
    real = fsspec.core.url_to_fs
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url: real(url.replace("gs://", "memory://")))
    return memory


def files_in(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_is_copied_once_and_what_changed_again(bucket, tmp_path):
    lines = []
    folder = fetch.locate("gs://bucket/model", tmp_path, lines.append)
    wanted = set(FILES) - {"old.bin"}
    assert files_in(folder) - {remote._LISTING} == wanted
    assert all((folder / name).read_bytes() == FILES[name] for name in wanted)
    assert bucket.opened[-1] == "config.json" and "3 files" in lines[0]
    bucket.opened.clear()
    assert fetch.locate("gs://bucket/model/", tmp_path, lines.append) == folder
    assert bucket.opened == [] and len(lines) == 1
    bucket.pipe("/bucket/model/model.safetensors", b"new")
    bucket.rm("/bucket/model/params/embedding/0.0")
    bucket.opened.clear()
    fetch.locate("gs://bucket/model", tmp_path)
    assert bucket.opened == ["model.safetensors"] and (folder / "model.safetensors").read_bytes() == b"new"
    assert not (folder / "params/embedding/0.0").exists()


def test_an_interrupted_copy_goes_on_with_the_next_file_and_loads_nowhere_before(bucket, tmp_path, monkeypatch):
    copies = []

    def breaks(source, sink, length):
        copies.append(1)
        if len(copies) == 2:
            sink.write(source.read(10))
            raise ConnectionResetError(104, "Connection reset by peer")
        sink.write(source.read())

    monkeypatch.setattr(remote.shutil, "copyfileobj", breaks)
    with pytest.raises(ConfigError, match="'gs://bucket/model': cannot be copied to .*: Connection reset by peer"):
        fetch.locate("gs://bucket/model", tmp_path)
    [folder] = (tmp_path / "models").iterdir()
    assert not (folder / "config.json").exists()
    bucket.opened.clear()
    fetch.locate("gs://bucket/model", tmp_path)
    assert bucket.opened == ["params/embedding/0.0", "config.json"]
    assert files_in(folder) - {remote._LISTING} == set(FILES) - {"old.bin"}


def test_a_gguf_in_a_bucket_loads(bucket, tmp_path):
    source = random_gguf(tmp_path / "m.gguf", num_heads=4, num_kv_heads=2)
    bucket.pipe("/bucket/m.gguf", source.read_bytes())
    path = fetch.locate("gs://bucket/m.gguf", tmp_path / "cache")
    assert path.name == "m.gguf" and load_model(path, "float32").digest == load_model(source, "float32").digest
    config = Config().replace("model", path="gs://bucket/m.gguf").replace("compile", cache_dir=str(tmp_path / "cache"))
    assert fetch.with_model_on_disk(config).model.served_name == "gs://bucket/m.gguf"


def test_what_is_wrong_with_a_bucket_is_one_line(bucket, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="'gs://bucket/nothing': nothing is there"):
        fetch.locate("gs://bucket/nothing", tmp_path)
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(remote.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match="0.0 GB are needed in .*, 0.0 GB are free"):
        fetch.locate("gs://bucket/model", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be copied to .*: Not a directory"):
        fetch.locate("gs://bucket/model", tmp_path / "file")


def test_without_gcsfs_the_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # as where it is not installed
    with pytest.raises(ConfigError, match=r"gs:// needs gcsfs; try: pip install 'jserve\[gcs\]'"):
        fetch.locate("gs://bucket/model", tmp_path)


# The hub


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """A hub that cannot be reached, and a cache with two revisions of one model."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--org--name"
    for revision, commit in (("main", "a" * 40), ("v1", "b" * 40)):
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "snapshots" / commit / "config.json").write_text(json.dumps({"revision": revision}))
        (folder / "snapshots" / commit / "m.gguf").write_bytes(b"GGUF")
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / revision).write_text(commit)
    return tmp_path


@pytest.mark.parametrize("name, revision", [("hf:org/name", "main"), ("hf:org/name@v1", "v1"), ("hf:org/name@" + "b" * 40, "v1")])
def test_what_is_in_the_hubs_cache_needs_no_network(cached, name, revision):
    folder = fetch.locate(name, cached)
    assert json.loads((folder / "config.json").read_text()) == {"revision": revision}


def test_one_file_of_a_repository(cached):
    assert fetch.locate("hf:org/name/m.gguf", cached).read_bytes() == b"GGUF"
    assert "b" * 40 in str(fetch.locate("hf:org/name/m.gguf@v1", cached))


def test_offline_without_a_copy_is_one_clear_line(cached):
    for name in ("hf:org/other", "hf:org/other@v2", "hf:org/name/other.gguf"):
        with pytest.raises(ConfigError) as refused:
            fetch.locate(name, cached)
        assert str(refused.value) == (
            f"model.path = {name!r}: cannot be fetched: the hub cannot be reached and it is not in the cache (HF_HOME);"
            " fetch it where there is a network (`hf download`), copy it here and name the folder"
        )


class _Response:
    headers, request, status_code = {}, None, 403


@pytest.mark.parametrize(
    "kind, message",
    [
        ("GatedRepoError", "gated; accept its terms on the hub's page of org/name, then set HF_TOKEN"),
        ("RepositoryNotFoundError", "no such repository, or a private one; for that set HF_TOKEN"),
        ("RevisionNotFoundError", "org/name has no revision 'v9'"),
    ],
)
def test_what_the_hub_refuses_is_one_line(monkeypatch, tmp_path, kind, message):
    seen = {}

    def refuse(repository, **options):
        seen.update(options, repository=repository)
        raise getattr(errors, kind)("401 Client Error.\n\nMore lines.", response=_Response())

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ConfigError) as refused:
        fetch.locate("hf:org/name@v9", tmp_path)
    assert message in str(refused.value) and "\n" not in str(refused.value)
    assert (seen["repository"], seen["revision"]) == ("org/name", "v9") and "token" not in seen


def test_a_repository_of_ggufs_only_asks_for_a_file(cached):
    (cached / "models--org--name" / "snapshots" / ("a" * 40) / "config.json").unlink()
    with pytest.raises(ConfigError, match="org/name has no config.json; of a GGUF name its file"):
        fetch.locate("hf:org/name", cached)
