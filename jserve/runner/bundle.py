"""A compile bundle: a folder with every executable of one compile plan, made once and served from anywhere it fits.

Unlike the cache of earlier starts it is made on purpose (`jserve compile`), is never written again, and where it does
not fit it is refused by naming what differs, instead of being compiled anew.  Its files are pickles, as jax serialises
executables: serve only bundles that you made or trust.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from jserve.config import BadUsage, ConfigError

NAME = "jserve_bundle.json"
_LONGEST = 80
"""Characters of a value in a message."""


@dataclass(frozen=True)
class Bundle:
    folder: Path
    facts: Mapping[str, str]
    """What has to be equal where it is served."""
    num_blocks: int
    """Blocks of the KV pool that the programs were made for."""
    programs: Mapping[str, Mapping[str, Any]]
    """name -> file, num_bytes, sha256."""

    def check(self, facts: Mapping[str, str]) -> None:
        """ConfigError names what differs."""
        names = [name for name in {**self.facts, **facts} if self.facts.get(name) != facts.get(name)]
        if names:
            differing = [
                f"{name}: expected {_shown(self.facts.get(name))}, found {_shown(facts.get(name))}" for name in names
            ]
            more = f"; and {len(names) - 4} more" if len(names) > 4 else ""
            raise ConfigError(
                f"compile.bundle = {str(self.folder)!r} was made for something else: {'; '.join(differing[:4])}{more}. "
                "Make it again with `jserve compile`, or start without it"
            )

    def load(self, name: str, devices: Sequence[jax.Device]) -> jax.stages.Compiled:
        """A program's executable on these devices.  ConfigError: there is none, it is damaged, or the runtime refuses it."""
        entry = self.programs.get(name)
        if entry is None:
            raise ConfigError(f"compile.bundle = {str(self.folder)!r} has no program {name}; make it again")
        path = self.folder / entry["file"]
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}; make the bundle again") from None
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise ConfigError(f"{path}: other bytes than were written; make the bundle again")
        try:
            return serialize_executable.deserialize_and_load(*pickle.loads(content), execution_devices=devices)
        except Exception as error:  # whatever the runtime has against it
            raise ConfigError(f"{path}: this runtime does not load {name}: {error}") from None

    def save(self, name: str, compiled: jax.stages.Compiled) -> None:
        raise AssertionError(f"{name} was compiled although there is a bundle")

    def close(self) -> None:
        """Nothing is kept open."""


def open_bundle(folder: str | Path) -> Bundle:
    """ConfigError where there is none that can be read."""
    folder = Path(folder).expanduser()
    try:
        value = json.loads((folder / NAME).read_bytes())
        return Bundle(folder, value["facts"], value["num_blocks"], value["programs"])
    except OSError as error:
        why = "no such folder" if not folder.is_dir() else f"{NAME}: {error.strerror}"
        raise BadUsage(f"compile.bundle = {str(folder)!r}: {why}; `jserve compile --out` makes one") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"compile.bundle = {str(folder)!r}: {NAME} is damaged ({error!r})") from None


def write_bundle(
    folder: str | Path,
    facts: Mapping[str, str],
    num_blocks: int,
    executables: Iterable[tuple[str, jax.stages.Compiled]],
) -> Bundle:
    """Writes a new bundle; the folder appears when all of it is on disk.  ConfigError where it cannot."""
    folder = Path(folder).expanduser().absolute()
    check_free(folder)
    scratch = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        programs = {name: _write(scratch, name, compiled) for name, compiled in executables}
        value = {"num_blocks": num_blocks, "facts": dict(facts), "programs": programs}
        (scratch / NAME).write_text(json.dumps(value, indent=1) + "\n")
        scratch.chmod(0o755)
        os.replace(scratch, folder)
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error.strerror or error}") from None
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    return Bundle(folder, dict(facts), num_blocks, programs)


def check_free(folder: Path) -> None:
    """ConfigError where a bundle would take the place of something, or could not be written: before minutes of work."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadUsage(f"--out {folder}: already there; remove it, or name another folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent):
            pass
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error.strerror or error}; name a folder that can be written") from None


def _write(folder: Path, name: str, compiled: jax.stages.Compiled) -> dict[str, Any]:
    content = pickle.dumps(serialize_executable.serialize(compiled))
    digest = hashlib.sha256(content).hexdigest()
    file = hashlib.sha256(name.encode()).hexdigest()[:32]
    with open(folder / file, "wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    return {"file": file, "num_bytes": len(content), "sha256": digest}


def _shown(value: str | None) -> str:
    if value is None:
        return "nothing"
    return repr(value) if len(value) <= _LONGEST else f"{value[:_LONGEST]!r}..."
