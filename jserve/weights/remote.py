"""Models that lie elsewhere: on the Hugging Face hub (`hf:org/name`), or in a bucket (`gs://bucket/folder`); so may
compile bundles.

They are copied to local disk once, file by file, and load from there like any other: a tensor at a time.  So the disk
needs room for the model, and host memory does not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jserve.config import BadUsage, ConfigError

Report = Callable[[str], None]

WANTED = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
"""What a model folder on the hub needs."""
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx")
_CHUNK_BYTES = 8 << 20
_LISTING = ".jserve_remote.json"
"""Beside copied files: what the bucket said of each when it was copied."""


def from_hugging_face(name: str, report: Report) -> Path:
    """A snapshot of `org/name`, `org/name@revision`, or one file of either (`org/name/x.gguf`), kept where
    huggingface_hub keeps its own; the token comes from where it looks for one (HF_TOKEN, `hf auth login`).

    Raises ConfigError, naming the model and what would do.
    """
    import huggingface_hub
    from huggingface_hub import errors

    place, _, revision = name.partition("@")
    organisation, _, rest = place.partition("/")
    repository, _, file = rest.partition("/")
    if not (organisation and repository) or ("@" in name and not revision):
        expected = "hf:org/name, hf:org/name@revision or hf:org/name/file.gguf"
        raise BadUsage(f"model.path = 'hf:{name}': expected {expected}")
    repository = f"{organisation}/{repository}"
    report(f"fetching {name} from the Hugging Face hub")
    try:
        if file:
            return Path(huggingface_hub.hf_hub_download(repository, file, revision=revision or None))
        folder = Path(
            huggingface_hub.snapshot_download(repository, revision=revision or None, allow_patterns=list(WANTED))
        )
    except errors.GatedRepoError:
        why = f"gated; accept its terms on the hub's page of {repository}, then set HF_TOKEN or run `hf auth login`"
    except errors.RevisionNotFoundError:
        why = f"{repository} has no revision {revision!r}"
    except errors.RepositoryNotFoundError:
        why = "no such repository, or a private one; for that set HF_TOKEN or run `hf auth login`"
    except errors.EntryNotFoundError as error:
        why = f"{repository} has no {file}"
        if isinstance(error, errors.LocalEntryNotFoundError):
            why = (
                "the hub cannot be reached and it is not in the cache (HF_HOME); fetch it where there is a network"
                " (`hf download`), copy it here and name the folder"
            )
    except OSError as error:  # the disk, or the network
        why = error.strerror or _first_line(error)
    except Exception as error:  # the client raises many kinds
        why = _first_line(error)
    else:
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model.path = 'hf:{name}': {repository} has no config.json; of a GGUF name its file")
        return folder
    raise ConfigError(f"model.path = 'hf:{name}': cannot be fetched: {why}")


def from_bucket(url: str, cache_dir: Path, report: Report, setting: str = "model.path") -> Path:
    """The local copy of a folder or a file in a bucket, which `setting` names.  What changed in the bucket since is copied again; a copy that
    was interrupted goes on with the next file.

    Raises ConfigError, naming setting, URL and what would do.
    """
    what = f"{setting} = {url!r}"
    filesystem, path = _open(what, url)
    target = cache_dir / "models" / f"{hashlib.sha256(url.rstrip('/').encode()).hexdigest()[:16]}-{Path(path).name}"
    with _one_line(what, f"copied to {target}"):
        listed = {name: entry for name, entry in filesystem.find(path, detail=True).items() if _is_wanted(name)}
        if not listed:
            raise ConfigError(f"{what}: nothing is there")
        is_file = list(listed) == [path.rstrip("/")]
        prefix = len(path.rstrip("/")) + 1
        entries = {Path(path).name if is_file else name[prefix:]: entry for name, entry in listed.items()}
        for name in entries:
            if name.startswith("/") or ".." in Path(name).parts:
                raise ConfigError(f"{what}: {name!r} is no name of a file within it")
        target.mkdir(parents=True, exist_ok=True)
        _copy(filesystem, entries, target, what, url, report)
    return target / Path(path).name if is_file else target


def to_bucket(folder: Path, url: str, last: str, what: str) -> None:
    """Copies a folder of files to a bucket, `last` after all others: where it is, all is there.

    Raises ConfigError, beginning with `what`, also where the place is taken.
    """
    filesystem, path = _open(what, url)
    path = path.rstrip("/")
    with _one_line(what, "written"):
        if filesystem.exists(path) and filesystem.find(path):
            raise ConfigError(f"{what}: already there; remove it, or name another folder")
        names = sorted((name for name in os.listdir(folder)), key=lambda name: (name == last, name))
        for name in names:
            with (folder / name).open("rb") as source, filesystem.open(f"{path}/{name}", "wb") as sink:
                shutil.copyfileobj(source, sink, _CHUNK_BYTES)


def _open(what: str, url: str) -> tuple[Any, str]:
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except ImportError:
        protocol = url.partition("://")[0]
        raise ConfigError(
            f"{what}: {protocol}:// needs gcsfs; try: pip install 'jserve[gcs]', or copy it to a folder "
            "(gcloud storage cp -r) and name that"
        ) from None


def _copy(filesystem: Any, entries: Mapping[str, dict], target: Path, what: str, url: str, report: Report) -> None:
    known = _read_listing(target)
    facts = {name: _facts(entry) for name, entry in entries.items()}
    stale = [name for name in entries if known.get(name) != facts[name] or not (target / name).is_file()]
    for name in known.keys() - entries.keys():  # gone from the bucket
        (target / name).unlink(missing_ok=True)
    if not stale:
        return
    needed, free = sum(entries[name]["size"] for name in stale), shutil.disk_usage(target).free
    if needed > free:
        raise ConfigError(
            f"{what}: {needed / 1e9:.1f} GB are needed in {target}, {free / 1e9:.1f} GB are free"
        )
    report(f"fetching {url} ({len(stale)} files, {needed / 1e6:,.0f} MB) into {target}")
    # config.json last: without it nothing loads.
    for name in sorted(stale, key=lambda name: (Path(name).name == "config.json", name)):
        part = target / f"{name}.part"
        part.parent.mkdir(parents=True, exist_ok=True)
        with filesystem.open(entries[name]["name"], "rb") as source, part.open("wb") as sink:
            shutil.copyfileobj(source, sink, _CHUNK_BYTES)
        found, expected = part.stat().st_size, entries[name]["size"]
        if found != expected:
            raise ConfigError(f"{what}: {name} ended after {found} of {expected} bytes")
        os.replace(part, target / name)
        known = {**{name: fact for name, fact in known.items() if name in entries}, name: facts[name]}
        (target / _LISTING).write_text(json.dumps(known))


def _read_listing(target: Path) -> dict[str, list]:
    try:
        return json.loads((target / _LISTING).read_text())
    except (OSError, ValueError):
        return {}


def _facts(entry: Mapping[str, Any]) -> list:
    """What tells one version of an object from another."""
    return [entry["size"], *(str(entry.get(key)) for key in ("etag", "generation", "mtime", "created"))]


def _is_wanted(name: str) -> bool:
    parts = Path(name).parts
    return not name.endswith(_OTHER_FORMATS) and not any(part.startswith(".git") for part in parts)


@contextlib.contextmanager
def _one_line(what: str, doing: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise ConfigError(f"{what}: nothing is there") from None
    except OSError as error:  # the disk, the network, no permission
        raise ConfigError(f"{what}: cannot be {doing}: {error.strerror or error}") from None
    except ConfigError:
        raise
    except Exception as error:  # the client of the bucket raises its own kinds
        raise ConfigError(f"{what}: cannot be {doing}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
