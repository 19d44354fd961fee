"""The digests of a converted folder's files, beside them: what a conversion wrote, so that damage is found and named.

Sizes are cheap to compare and are, at every load; contents are compared where somebody asks.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from jserve.weights.errors import WeightsError

NAME = "jserve_manifest.json"
HF, ORBAX = "hf", "orbax"
ORBAX_FOLDER = "params"
"""Within the model's folder."""
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class FileDigest:
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    format: str
    """hf or orbax."""
    dtype: str
    """Of the parameters; "mixed" where the checkpoint keeps several."""
    source_digest: str
    """The digest of the checkpoint that was converted."""
    files: Mapping[str, FileDigest]
    """By path within the folder; every file but the manifest."""

    @property
    def digest(self) -> str:
        """Names the content of all the files."""
        return hashlib.sha256(_text(self).encode()).hexdigest()


def read(folder: Path) -> Manifest | None:
    """The folder's manifest; None where it has none.  WeightsError where the manifest itself is damaged."""
    path = folder / NAME
    try:
        value = json.loads(path.read_bytes())
        digest = value.pop("sha256")
        files = {name: FileDigest(**entry) for name, entry in value.pop("files").items()}
        manifest = Manifest(files=files, **value)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path}: the manifest is damaged ({error!r})") from None
    if manifest.digest != digest:
        raise WeightsError(f"{path}: the manifest is damaged: its own SHA-256 does not fit; convert the model again")
    return manifest


def write(folder: Path, manifest: Manifest) -> None:
    value = {**json.loads(_text(manifest)), "sha256": manifest.digest}
    write_synced(folder / NAME, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


def write_synced(path: Path, content: bytes) -> FileDigest:
    """Writes a file through to the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return digest_of(content)


def digest_of(content: bytes) -> FileDigest:
    return FileDigest(len(content), hashlib.sha256(content).hexdigest())


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """WeightsError names a file that is missing or has another length than it was written with."""
    for name, expected in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise WeightsError(f"{path}: missing; {NAME} lists it")
        if path.stat().st_size != expected.num_bytes:
            raise WeightsError(f"{path}: {path.stat().st_size} bytes, {expected.num_bytes} were written")


def verify(folder: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> Manifest:
    """Reads every file and compares it with what was written.  WeightsError names all that differ."""
    manifest = read(folder)
    if manifest is None:
        raise WeightsError(f"{folder}: no {NAME}; only folders that `jserve convert` wrote can be verified")
    check_sizes(folder, manifest)
    total = sum(expected.num_bytes for expected in manifest.files.values())
    done, damaged = 0, []
    for name, expected in manifest.files.items():
        before = done
        found = digest_file(folder / name, lambda count: progress(before + count, total))
        done += expected.num_bytes
        if found != expected:
            damaged.append(name)
    if damaged:
        raise WeightsError(f"{folder}: other bytes than were written: {', '.join(damaged)}; convert the model again")
    return manifest


def digest_file(path: Path, progress: Callable[[int], None] = lambda count: None) -> FileDigest:
    digest, count = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
            count += len(chunk)
            progress(count)
    return FileDigest(count, digest.hexdigest())


def _text(manifest: Manifest) -> str:
    return json.dumps(asdict(manifest), sort_keys=True)
