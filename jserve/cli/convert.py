"""`jserve convert SRC DST --to hf|orbax`: the same model in another format, and the check of what it once wrote."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from jserve.cli.command import Command
from jserve.cli.progress import StartReport
from jserve.config import BadUsage, CompileSection


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", nargs="?", metavar="SRC", help="a known name, a GGUF file, or a folder (safetensors or Orbax)"
    )
    parser.add_argument("target", nargs="?", metavar="DST", help="the folder to make; must not be there yet")
    parser.add_argument("--to", choices=("hf", "orbax"), help="what to make")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"),
        help="of the weights [as they are; quantised ones: float32, which holds them exactly]",
    )
    parser.add_argument(
        "--shard-gb", type=float, default=4.0, metavar="GB", help="largest safetensors file [%(default)g]"
    )
    parser.add_argument(
        "--verify", metavar="FOLDER", help="compare a converted folder with its digests, and do nothing else"
    )
    parser.add_argument(
        "--cache-dir", default=CompileSection().cache_dir, metavar="FOLDER", help="fetched models [%(default)s]"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    report = StartReport()
    try:
        return _verify(arguments, report) if arguments.verify else _convert(arguments, report)
    finally:
        report.close()


def _convert(arguments: argparse.Namespace, report: StartReport) -> int:
    if not (arguments.source and arguments.target and arguments.to):
        print("jserve convert: SRC, DST and --to hf|orbax are needed, or --verify FOLDER", file=sys.stderr)
        print("try: jserve convert --help", file=sys.stderr)
        return 2
    if not arguments.shard_gb > 0:
        raise BadUsage(f"--shard-gb {arguments.shard_gb:g}: must be above 0")
    from jserve.weights.convert import convert
    from jserve.weights.fetch import locate

    path = locate(arguments.source, arguments.cache_dir, report)
    done = convert(
        path, arguments.target, arguments.to, dtype=arguments.dtype, shard_bytes=int(arguments.shard_gb * 1e9),
        report=report.progress,
    )
    if arguments.json:
        facts = {"path": str(done.path), "format": done.manifest.format, "dtype": done.manifest.dtype,
                 "num_bytes": done.num_bytes, "num_files": len(done.manifest.files), "digest": done.manifest.digest,
                 "source": str(path), "source_digest": done.manifest.source_digest}
        print(json.dumps(facts))
    else:
        facts = f"{done.num_bytes / 1e6:,.0f} MB, {done.manifest.dtype}, digest {done.manifest.digest[:16]}"
        print(facts, file=sys.stderr)
        print(done.path)
    return 0


def _verify(arguments: argparse.Namespace, report: StartReport) -> int:
    from jserve.weights import manifest

    found = manifest.verify(Path(arguments.verify), lambda done, total: report.progress("verify", done, total))
    if arguments.json:
        print(json.dumps({"path": arguments.verify, "format": found.format, "digest": found.digest,
                          "num_files": len(found.files)}))
    else:
        print(f"{arguments.verify}: all {len(found.files)} files are as they were written")
    return 0


COMMAND = Command(
    usage="SRC DST --to hf|orbax [--dtype DTYPE] [--json]  |  --verify FOLDER",
    summary="Converts a model.  The folder appears when all of it is on disk; an interrupted conversion leaves none.",
    add_arguments=add_arguments,
    run=run,
    epilog="""\
formats:
  hf       config, tokenizer, chat template and safetensors, as transformers and vLLM read them
  orbax    the parameter tree as an Orbax checkpoint, which jserve restores without rearranging

examples:
  jserve convert smollm2-135m ./smollm2-hf --to hf
  jserve convert ./smollm2-hf ./smollm2-orbax --to orbax --dtype bfloat16
  jserve serve --model ./smollm2-orbax
  jserve convert --verify ./smollm2-orbax""",
)
