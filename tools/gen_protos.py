"""Generates jserve/proto_gen from proto/jserve/v1 with grpcio-tools.

`python tools/gen_protos.py` writes the files, `--check` says whether they are current.  The generated modules import
each other relatively: the package is called `jserve.proto_gen`, whatever the proto package is called.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO_ROOT = ROOT / "proto"
OUTPUT = ROOT / "jserve" / "proto_gen"
PACKAGE_DOC = '"""Generated from proto/jserve/v1 by tools/gen_protos.py; not edited by hand."""\n'


def proto_files() -> list[Path]:
    return sorted((PROTO_ROOT / "jserve" / "v1").glob("*.proto"))


def generate() -> dict[str, str]:
    """The generated files: text by file name."""
    with tempfile.TemporaryDirectory() as folder:
        sources = proto_files()
        with_service = [path for path in sources if re.search(r"^service ", path.read_text(), re.MULTILINE)]
        _protoc([f"--python_out={folder}", f"--pyi_out={folder}"], sources)
        _protoc([f"--grpc_python_out={folder}"], with_service)
        files = {path.name: _with_relative_imports(path.read_text()) for path in Path(folder).rglob("*.py*")}
    return {"__init__.py": PACKAGE_DOC, **files}


def descriptor_set() -> bytes:
    """The protos as a serialized FileDescriptorSet, which does not depend on the version of grpcio-tools."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "descriptors"
        _protoc([f"--descriptor_set_out={output}"], proto_files())
        return output.read_bytes()


def stale_files(files: dict[str, str]) -> list[str]:
    """Names of files in OUTPUT that are missing, differ, or should not be there."""
    present = {path.name: path.read_text() for path in OUTPUT.glob("*.py*")}
    return sorted(name for name in files.keys() | present.keys() if files.get(name) != present.get(name))


def _protoc(outputs: list[str], sources: list[Path]) -> None:
    import grpc_tools
    from grpc_tools import protoc

    well_known = Path(grpc_tools.__file__).parent / "_proto"
    arguments = ["protoc", f"-I{PROTO_ROOT}", f"-I{well_known}", *outputs, *map(str, sources)]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")


def _with_relative_imports(text: str) -> str:
    return re.sub(r"^from jserve\.v1 import ", "from . import ", text, flags=re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is not current")
    check = parser.parse_args().check
    files = generate()
    stale = stale_files(files)
    if check:
        print("\n".join(f"not current: {name}" for name in stale) or "current")
        return 1 if stale else 0
    OUTPUT.mkdir(parents=True, exist_ok=True)
    for name in stale:
        if name in files:
            (OUTPUT / name).write_text(files[name])
        else:
            (OUTPUT / name).unlink()
    print(f"{OUTPUT.relative_to(ROOT)}: {len(stale)} files written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
