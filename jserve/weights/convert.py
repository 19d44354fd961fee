"""One model, from a GGUF, an HF folder or an Orbax checkpoint, into either of the last two: streamed, all or nothing.

Everything is written into a folder beside the target that no loader accepts (its config.json comes last), with the
digests of its files, and renamed when all of it is on disk.  What a killed conversion left is removed by the next one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jserve.models.registry import model_code
from jserve.models.spec import num_bytes
from jserve.weights import manifest
from jserve.weights.checkpoint import Checkpoint, open_checkpoint
from jserve.weights.errors import WeightsError
from jserve.weights.hf_files import CONFIG, describing_files
from jserve.weights.manifest import HF, ORBAX, ORBAX_FOLDER, FileDigest, Manifest
from jserve.weights.safetensors_write import DTYPES, dtype_of, size_of, write_tensors

SHARD_BYTES = 4 << 30
Report = Callable[[str, int, int], None]
"""(phase, bytes done, bytes of the phase)"""


@dataclass(frozen=True)
class Converted:
    path: Path
    manifest: Manifest
    num_bytes: int
    """Of all files."""


def convert(
    source: str | Path,
    target: str | Path,
    format: str,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    report: Report = lambda phase, done, total: None,
) -> Converted:
    """Converts the model at `source` into the new folder `target`.

    `dtype` None keeps what the checkpoint has; quantised tensors become float32, which holds them exactly.  A source
    with a manifest is verified first.  WeightsError names what is wrong with the source, or in the way.
    """
    source, target = Path(source), Path(target).expanduser().absolute()
    if format not in (HF, ORBAX):
        raise WeightsError(f"--to {format}: not built; {HF} and {ORBAX} are")
    if dtype is not None and dtype not in DTYPES:
        raise WeightsError(f"--dtype {dtype}: not built; {', '.join(DTYPES)} are")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise WeightsError(f"{target}: already there; remove it, or name another folder")
    if source.is_dir() and manifest.read(source) is not None:
        manifest.verify(source, lambda done, total: report("verify source", done, total))
    checkpoint = _with_tensors(open_checkpoint(source))
    with _scratch_beside(target) as scratch:
        write = _write_hf if format == HF else _write_orbax
        done = write(checkpoint, scratch, dtype, shard_bytes, report)
        _rename(scratch, target)
    return Converted(target, done, sum(file.num_bytes for file in done.files.values()))


def _with_tensors(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint that has its tensors by name, also where they lie in an Orbax checkpoint."""
    if checkpoint.arrays is None:
        return checkpoint
    from jserve.weights.orbax_params import named_specs
    from jserve.weights.orbax_tensors import open_tensors

    stored = manifest.read(checkpoint.path).dtype
    specs = model_code(checkpoint.config).param_specs(checkpoint.config, stored)
    return dataclasses.replace(checkpoint, tensors=open_tensors(checkpoint.arrays, named_specs(specs)))


def _write_hf(checkpoint: Checkpoint, scratch: Path, dtype: str | None, shard_bytes: int, report: Report) -> Manifest:
    tensors = dict(checkpoint.tensors)
    _check_space(scratch, sum(size_of(tensor, dtype) for tensor in tensors.values()))
    stored = _common(checkpoint, dtype)
    describing = describing_files(checkpoint, stored)  # before the weights: what it refuses, it refuses at once
    files = write_tensors(scratch, tensors, dtype, shard_bytes, lambda *amounts: report("write weights", *amounts))
    return _finish(checkpoint, scratch, HF, stored, describing, files)


def _write_orbax(checkpoint: Checkpoint, scratch: Path, dtype: str | None, _: int, report: Report) -> Manifest:
    from jserve.weights.orbax_params import save_params

    # The tree has one dtype; float16 is none that jserve computes in.
    stored = dtype or ("bfloat16" if _common(checkpoint, None) == "bfloat16" else "float32")
    if stored == "float16":
        raise WeightsError("--dtype float16: not for --to orbax; float32 and bfloat16 are")
    specs = model_code(checkpoint.config).param_specs(checkpoint.config, stored)
    _check_space(scratch, num_bytes(specs))
    describing = describing_files(checkpoint, stored)
    save_params(scratch / ORBAX_FOLDER, specs, checkpoint, lambda *amounts: report("write weights", *amounts))
    paths = [path for path in sorted((scratch / ORBAX_FOLDER).rglob("*")) if path.is_file()]
    total, done, files = sum(path.stat().st_size for path in paths), 0, {}
    for path in paths:
        files[path.relative_to(scratch).as_posix()] = found = manifest.digest_file(path)
        done += found.num_bytes
        report("digest", done, total)
    return _finish(checkpoint, scratch, ORBAX, stored, describing, files)


def _finish(
    checkpoint: Checkpoint, scratch: Path, format: str, dtype: str, describing: dict[str, bytes],
    files: dict[str, FileDigest],
) -> Manifest:
    """Writes what lies beside the weights, config.json last of all."""
    for name in sorted(describing, key=lambda name: name == CONFIG):
        if name != CONFIG:
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            files[name] = manifest.write_synced(scratch / name, describing[name])
    files[CONFIG] = manifest.digest_of(describing[CONFIG])
    done = Manifest(format, dtype, checkpoint.digest, dict(sorted(files.items())))
    manifest.write(scratch, done)
    manifest.write_synced(scratch / CONFIG, describing[CONFIG])
    return done


def _common(checkpoint: Checkpoint, dtype: str | None) -> str:
    """The dtype of the matrices; float32 where they have several."""
    found = {dtype_of(tensor, dtype) for tensor in checkpoint.tensors.values() if len(tensor.shape) > 1}
    return found.pop() if len(found) == 1 else "float32"


@contextlib.contextmanager
def _scratch_beside(target: Path) -> Iterator[Path]:
    """An empty folder beside `target`, locked for this process, and gone afterwards (unless it became the target)."""
    scratch = target.parent / f".{target.name}.converting"
    scratch.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(scratch, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not (scratch.exists() and os.path.samestat(os.fstat(descriptor), scratch.stat())):
            raise BlockingIOError  # whoever held it has just finished
        _empty(scratch)
        yield scratch
    except BlockingIOError:
        raise WeightsError(f"{target}: another conversion is writing it") from None
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    finally:
        os.close(descriptor)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _rename(scratch: Path, target: Path) -> None:
    _sync(scratch)
    os.replace(scratch, target)  # takes the place of an empty folder too
    _sync(target.parent)


def _sync(folder: Path) -> None:
    """Directory entries reach the disk by a sync of the folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise WeightsError(f"{folder.parent}: {needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free")
