"""Executables of earlier starts, on disk: a warm start loads them and neither traces nor compiles.

jax's own compilation cache stays off: on CPU, an executable that came out of it cannot be serialised again (it loads,
and fails when it runs).  A file is found only where all that could change the program is equal: see `environment_facts`.  What cannot be read is
compiled again.  The folder is the user's own cache; files are pickles, as jax serialises executables, so it must not be shared with
people one does not trust.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import pickle
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

import jserve
import pallas_kernels

log = logging.getLogger(__name__)

_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_threefry_partitionable")
"""Settings of jax that change what a program computes."""
MOST_SETS = 16
"""Fingerprints whose executables are kept; the least recently used go first."""


def environment_facts(device: Any) -> dict[str, str]:
    """What besides the program decides whether an executable for `device` fits, by name: packages, device, compiler
    settings, and jserve's own source.  `device` may be a description of one that is not here."""
    names = ("jax", "jaxlib", "flax", "numpy", *(["libtpu"] if device.platform == "tpu" else []))
    facts = {name: _version(name) for name in names}
    facts |= {"platform": device.platform, "device": device.device_kind}
    if device.platform != "tpu":  # there libtpu is the runtime
        facts["runtime"] = device.client.platform_version
    if device.platform == "cpu":
        facts["processor"] = _processor()
    facts |= {name: str(jax.config.values[name]) for name in _SETTINGS}
    facts |= {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
    return facts | {"jserve": _source_digest()}


def fingerprint(facts: Mapping[str, str]) -> str:
    """Hex digest of `facts`."""
    digest = hashlib.sha256()
    for item in sorted(facts.items()):
        text = repr(item).encode()
        digest.update(len(text).to_bytes(8, "big") + text)
    return digest.hexdigest()


class ExecutableStore:
    """The executables of one fingerprint, by program name."""

    def __init__(self, root: str | Path, key: str):
        self._folder = Path(root) / key[:32]
        self._has_failed = False

    def load(self, name: str, devices: Sequence[jax.Device]) -> jax.stages.Compiled | None:
        """The program's executable on these devices, or None where there is none that can be used."""
        path = self._path(name)
        try:
            return serialize_executable.deserialize_and_load(
                *pickle.loads(path.read_bytes()), execution_devices=devices
            )
        except FileNotFoundError:
            return None
        except Exception as error:  # a damaged file, or one this runtime refuses: compile again
            log.warning("%s cannot be used (%s); the program is compiled again", path, error)
            return None

    def save(self, name: str, compiled: jax.stages.Compiled) -> None:
        """Keeps an executable; a full or read-only disk costs the next start time, nothing else."""
        path = self._path(name)
        try:
            content = pickle.dumps(serialize_executable.serialize(compiled))
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                file.write(content)
            os.replace(file.name, path)
        except Exception as error:
            if not self._has_failed:  # once, not for each of a hundred programs
                log.warning("compiled programs cannot be kept in %s, so the next start compiles again: %s; "
                            "another folder: --cache-dir", self._folder.parent, getattr(error, "strerror", None) or error)
            self._has_failed = True

    def forget(self) -> None:
        """Removes all executables of this fingerprint."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Marks the set as used now, and removes the sets that were not used for longest."""
        try:
            os.utime(self._folder)
            sets = sorted(self._folder.parent.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
            for old in sets[MOST_SETS:]:
                shutil.rmtree(old, ignore_errors=True)
        except OSError:
            pass  # read-only, or another process tidies at the same time

    def _path(self, name: str) -> Path:
        return self._folder / hashlib.sha256(name.encode()).hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _source_digest() -> str:
    """Of jserve's own code: another version may make other programs."""
    digest = hashlib.sha256()
    for package in (jserve, pallas_kernels):
        root = Path(package.__file__).parent
        for path in sorted((*root.rglob("*.py"), *root.rglob("tuned/*.json"))):  # sizes of kernels' tiles
            digest.update(path.read_bytes())
    return f"{jserve.__version__} {digest.hexdigest()[:16]}"


def _processor() -> str:
    """What the compiler made the code for: another processor may lack its instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return os.uname().machine
    return "; ".join([line for line in lines if line.startswith(("flags", "Features", "model name"))][:2])
