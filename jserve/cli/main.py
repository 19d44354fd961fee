"""`jserve COMMAND`: finds the command, runs it, and turns what a person can cause into one line and an exit code.

Each command is a module of this package with a COMMAND; only the one asked for is imported.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from jserve.cli.flags import NEAR, Parser

FINE, FAILED, BAD_USAGE, INTERRUPTED = 0, 1, 2, 130

COMMANDS = {
    "serve": "the gRPC server",
    "chat": "an interactive chat, in process or with a running server",
    "generate": "one prompt, in process",
    "batch": "a file of requests to a file of results",
    "bench": "throughput and latency, of a server or in process; start-up; simulations",
    "top": "what a running server does, in the terminal",
    "plan": "memory, step times and settings of a model on a device, before it is rented",
    "replay": "the scheduler again on a step log: the same decisions, or the first that differs",
    "fetch": "put a model on disk",
    "convert": "a model into an HF folder or an Orbax checkpoint; checks what it wrote",
    "compile": "every program of a config into a bundle, which `serve --bundle` starts from without compiling",
    "doctor": "what is right and wrong with this machine, and what to do next",
    "token": "make a bearer token and its lines for the auth file",
}

USAGE = """\
usage: jserve COMMAND [flags]        jserve COMMAND --help tells more

{commands}

First steps:
  jserve chat                        talk to SmolLM2-135M (98 MB, fetched on first use)
  jserve serve --model MODEL         serve a GGUF file or a folder with safetensors over gRPC

Exit codes: 0 fine, 1 failed, 2 bad usage."""


def main(argv: Sequence[str] | None = None) -> int:
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`| head`) has left; python would complain again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return code


def run_process() -> None:
    """The console script: `main`, then the end of the process.

    Without the interpreter's shutdown, which takes seconds once jax and gRPC are loaded, and which would wait for every
    compile where the engine is still being built.
    """
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE.format(commands="\n".join(f"  {name:<10} {summary}" for name, summary in COMMANDS.items())))
        return FINE if argv else BAD_USAGE
    if argv[0] in ("-V", "--version"):
        from jserve import __version__

        print(f"jserve {__version__}")
        return FINE
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=NEAR)
        return _usage_error(f"unknown command {name!r}" + (f"; did you mean {near[0]}?" if near else ""))
    return _run(name, rest)


def _run(name: str, rest: list[str]) -> int:
    module = importlib.import_module(f"jserve.cli.{name}")
    if name == "bench":
        name, command, rest = module.find(rest)
        if command is None:
            return FINE if rest in (["-h"], ["--help"]) else BAD_USAGE
    else:
        command = module.COMMAND
    parser = Parser(
        prog=f"jserve {name}",
        usage=f"jserve {name} {command.usage}",
        description=command.summary,
        epilog=command.epilog,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    try:
        command.add_arguments(parser)
        arguments = parser.parse_args(rest)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else BAD_USAGE
    try:
        return command.run(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except Exception as error:
        return _failed(name, error, arguments.debug)


def _failed(name: str, error: Exception, debug: bool) -> int:
    from jserve.config import BadUsage

    line = user_line(error)
    if debug or line is None:
        traceback.print_exception(error)
    if line is None:
        print(f"jserve {name}: this is a bug in jserve, please report it with the lines above", file=sys.stderr)
    else:
        print(f"jserve {name}: {line}", file=sys.stderr)
    return BAD_USAGE if isinstance(error, BadUsage) else FAILED


def user_line(error: Exception) -> str | None:
    """One line for an error that a person can mend; None for a bug of ours."""
    from jserve.config import ConfigError
    from jserve.request import Code, RequestError

    if isinstance(error, RequestError):
        if error.code is Code.INTERNAL:
            return None
        return f"{error.code.value}: {error.message}{_next_step(error.code.value, error.message)}"
    checkpoint_errors = _loaded(("jserve.models.config", "ModelError"), ("jserve.tokenizer", "TokenizerError"))
    if isinstance(error, (ConfigError, *checkpoint_errors)):
        return _one_line(str(error))
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        return _one_line(f"{error.strerror or error}{where}")
    return None


def _next_step(code: str, message: str) -> str:
    """What a person at a terminal can do about what a server, or nobody, answered."""
    if code == "UNAUTHENTICATED":
        return "; give a token with --token-file FILE"
    if code == "UNAVAILABLE" and "onnect" in message:
        return "; is a server there (`jserve serve`), and does it want TLS (--tls-ca FILE)?"
    return ""


def _loaded(*names: tuple[str, str]) -> tuple[type, ...]:
    """Error classes of modules that this run has imported; an error of another module cannot have been raised."""
    return tuple(getattr(sys.modules[module], name) for module, name in names if module in sys.modules)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _usage_error(line: str) -> int:
    print(f"jserve: {line}\ntry: jserve --help", file=sys.stderr)
    return BAD_USAGE


if __name__ == "__main__":
    run_process()
