"""`jserve bench kernels`: attention on this device, beside its copy bandwidth and matrix rate."""

from __future__ import annotations

import argparse
import json
import sys

from jserve.bench import report
from jserve.cli.command import Command
from jserve.cli.number_flags import whole, whole_list
from jserve.config import ConfigError

DTYPES = ("float32", "bfloat16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from pallas_kernels.paged_attention import IMPLEMENTATIONS  # here, as they load jax
    from pallas_kernels.paged_attention.cases import HEADS

    parser.add_argument("--heads", choices=HEADS, default="smollm2-135m", metavar="NAME",
                        help=f"of {', '.join(HEADS)} [%(default)s]")
    parser.add_argument("--batch", type=whole_list, default=(1, 8, 32, 64), metavar="LIST", help="decodes [1,8,32,64]")
    parser.add_argument("--context", type=whole(), default=1000, metavar="N", help="tokens of each [%(default)s]")
    parser.add_argument("--chunk", type=whole_list, default=(128, 512), metavar="LIST", help="prefill chunks [128,512]")
    parser.add_argument("--past", type=whole(0), default=0, metavar="N", help="tokens before a chunk [%(default)s]")
    parser.add_argument("--implementation", type=_names, default=(), metavar="LIST",
                        help=f"of {','.join(IMPLEMENTATIONS)} [what a server takes here]")
    parser.add_argument("--dtype", choices=DTYPES, help="[float32 on CPU, else bfloat16]")
    parser.add_argument("--block-size", type=whole(), metavar="N", help="[32 on CPU, else 64]")
    parser.add_argument("--layers", type=whole(), default=4, metavar="N", help="layers a step [%(default)s]")
    parser.add_argument("--repeats", type=whole(), default=20, metavar="N", help="runs; the least counts [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.add_argument("--save-result", action="store_true", help="also write it as a file")
    parser.add_argument("--result-dir", default="results", metavar="FOLDER", help="[%(default)s]")


def run(arguments: argparse.Namespace) -> int:
    from jserve.bench import kernels

    load = kernels.KernelLoad(
        arguments.heads, arguments.batch, arguments.context, arguments.chunk, arguments.past, arguments.implementation,
        arguments.dtype, arguments.block_size, arguments.layers, arguments.repeats,
    )
    try:
        answer = kernels.measure(load, lambda point: print(f"{point['case']}: done", file=sys.stderr, flush=True))
    except NotImplementedError as error:
        raise ConfigError(str(error)) from None
    print(json.dumps(answer) if arguments.json else kernels.render(answer))
    if arguments.save_result:
        print(f"saved {report.save(answer, arguments.result_dir)}", file=sys.stderr)
    return 0


def _names(text: str) -> tuple[str, ...]:
    from pallas_kernels.paged_attention import IMPLEMENTATIONS

    names = tuple(text.split(","))
    if unknown := set(names) - set(IMPLEMENTATIONS):
        raise argparse.ArgumentTypeError(f"{sorted(unknown)[0]!r}: expected some of {','.join(IMPLEMENTATIONS)}")
    return names


COMMAND = Command(
    usage="[--heads NAME] [--batch LIST] [--chunk LIST] [flags]",
    summary="Paged attention on this device, as shares of what it copies and multiplies.",
    add_arguments=add_arguments,
    run=run,
    epilog="""\
example:
  jserve bench kernels --heads llama3-8b --batch 32,256 --context 2048 --chunk 2048 --past 6000""",
)
