"""`jserve compile --out DIR`: every executable that serving needs, made ahead, for `jserve serve --bundle DIR`."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import sys
import tempfile
import time

from jserve.cli.command import Command
from jserve.cli.flags import add_config_flags, config_from
from jserve.cli.progress import StartReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_flags(parser)
    parser.add_argument(
        "--out", required=True, metavar="FOLDER",
        help="the folder to make, here or gs://bucket/folder; must not be there yet",
    )
    parser.add_argument(
        "--target", metavar="TPU",
        help="v4, v5e, v5p, v6e, tpu7x, or v5e-8 and such, without having one (needs libtpu) [this machine]",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    if arguments.target is None:
        return compile_here(arguments)
    from jserve.cli.child import ChildDied, call_in_child
    from jserve.config import ConfigError

    try:
        return call_in_child(compile_here, arguments)
    except ChildDied as death:
        raise ConfigError(
            f"--target {arguments.target}: the TPU compiler{_libtpu_version()} died {death.how}; nothing was written. "
            "Try --compile.num_threads 1: it compiles one program at a time"
        ) from None


def compile_here(arguments: argparse.Namespace) -> int:
    """In this process, which a target that is not here needs to itself: its compiler has been seen to crash."""
    if arguments.target is not None:
        from pallas_kernels import targets

        targets.configure_environment()  # before jax starts
    from jserve.engine.bundle import compile_bundle
    from jserve.runner.bundle import NAME
    from jserve.weights.fetch import with_model_on_disk
    from jserve.weights.remote import to_bucket

    report, began = StartReport(), time.perf_counter()
    try:
        config = with_model_on_disk(config_from(arguments), report.line)
        with contextlib.ExitStack() as stack:
            is_bucket = "://" in arguments.out
            folder = stack.enter_context(tempfile.TemporaryDirectory()) + "/bundle" if is_bucket else arguments.out
            bundle = compile_bundle(config, folder, arguments.target, report)
            if is_bucket:
                to_bucket(bundle.folder, arguments.out, NAME, f"--out {arguments.out}")
    finally:
        report.close()
    num_bytes, seconds = sum(entry["num_bytes"] for entry in bundle.programs.values()), time.perf_counter() - began
    path = arguments.out if is_bucket else str(bundle.folder)
    if arguments.json:
        print(json.dumps({
            "path": path, "num_programs": len(bundle.programs), "num_bytes": num_bytes,
            "num_blocks": bundle.num_blocks, "seconds": round(seconds, 1), "device": bundle.facts["device"],
        }))
        return 0
    print(f"{len(bundle.programs)} programs for {bundle.facts['device']}, {num_bytes / 1e6:,.0f} MB, {seconds:.1f} s",
          file=sys.stderr)
    print(path)
    return 0


def _libtpu_version() -> str:
    try:
        return f" (libtpu {importlib.metadata.version('libtpu')})"
    except importlib.metadata.PackageNotFoundError:
        return ""


COMMAND = Command(
    usage="--model MODEL --out FOLDER [--target TPU] [flags of serve] [--json]",
    summary="Compiles what serving needs, without loading weights.  Serve with the same flags and --bundle FOLDER.",
    add_arguments=add_arguments,
    run=run,
    epilog="""\
examples:
  jserve compile --model smollm2-135m --out ./bundle
  jserve serve --model smollm2-135m --bundle ./bundle
  jserve compile --model smollm2-135m --out gs://bucket/bundle    then: serve --bundle gs://bucket/bundle
  jserve compile --model ./llama-3.2-1b --target v5e --kv.num_blocks 4096 --out ./bundle-v5e

A bundle serves exactly one config on one kind of device with one version of jax and of jserve; anything else is refused
by naming what differs.  Its files are pickles: serve only bundles that you made or trust.""",
)
