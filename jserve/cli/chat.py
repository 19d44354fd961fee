"""`jserve chat`: a conversation, with a model in this process or a running server; from a terminal or a pipe."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from jserve.cli.client_flags import add_client_flags, client_access
from jserve.cli.command import Command
from jserve.cli.flags import add_config_flags, config_from
from jserve.cli.progress import StartReport
from jserve.cli.sampling_flags import add_sampling_flags, sampling_params
from jserve.config import Config
from jserve.local_engine import for_one_stream, start_engine
from jserve.loop_thread import LoopThread
from jserve.request import FinishReason, GenerateRequest, GenerateUpdate, Message, RequestError, SamplingParams

HELP = """\
/reset   forget the conversation
/exit    leave (so does the end of the input)
Ctrl-C   stop the answer; at the prompt: leave"""

Generate = Callable[[GenerateRequest], Iterator[GenerateUpdate]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="use the server that runs there instead of loading a model"
    )
    add_client_flags(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message before the conversation")
    add_sampling_flags(parser)
    add_config_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    access = client_access(arguments)
    opened = _remote(arguments.address, access) if arguments.address else _local(config_from(arguments))
    with opened as (name, generate):
        return converse(generate, sampling_params(arguments), system=arguments.system, name=name)


def converse(generate: Generate, params: SamplingParams, *, system: str | None, name: str) -> int:
    """Reads turns from stdin until its end or /exit.  1 where a piped turn failed, else 0."""
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  input() edits lines and remembers them once this is imported
        print(f"chatting with {name}; /help lists commands", file=sys.stderr)
    history = opening = [Message("system", system)] if system else []
    exit_code = 0
    while (text := _read_turn(terminal)) is not None:
        if text in ("/exit", "/quit"):
            break
        if text == "/reset":
            history = opening
            print("(new conversation)", file=sys.stderr)
        elif text.startswith("/"):
            print(HELP, file=sys.stderr)
        elif text:
            asked = [*history, Message("user", text)]
            try:
                history = [*asked, Message("assistant", _answer(generate, asked, params))]
            except RequestError as error:
                # The turn is not kept, so the next one can work; a full context needs /reset.
                print(f"{error.code.value}: {error.message}", file=sys.stderr)
                exit_code = 0 if terminal else 1
    return exit_code


def _answer(generate: Generate, messages: list[Message], params: SamplingParams) -> str:
    """Streams the answer to stdout; Ctrl-C ends it and keeps what is there."""
    said, reason = "", None
    updates = generate(GenerateRequest(messages=messages, sampling_params=params))
    try:
        for update in updates:
            for output in update.outputs:
                print(output.text, end="", flush=True)
                said += output.text
                reason = output.finish_reason or reason
    except KeyboardInterrupt:
        reason = FinishReason.ABORTED
    finally:
        updates.close()
        print(flush=True)
    if reason is FinishReason.LENGTH:
        print("(cut: max_tokens or the end of the context; /reset begins anew)", file=sys.stderr)
    elif reason is FinishReason.ABORTED:
        print("(stopped)", file=sys.stderr)
    return said


def _read_turn(terminal: bool) -> str | None:
    """One line of stdin; None at its end, or at Ctrl-C in a terminal."""
    try:
        return input("> " if terminal else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        if not terminal:
            raise
        return None


@contextlib.contextmanager
def _remote(address: str, access: dict[str, Any]) -> Iterator[tuple[str, Generate]]:
    from jserve.server.client import Client

    with Client(address, **access) as client:
        yield client.model_info().name, client.generate


@contextlib.contextmanager
def _local(config: Config) -> Iterator[tuple[str, Generate]]:
    thread = LoopThread("jserve-chat")
    report = StartReport()
    try:
        engine = thread.run(start_engine(for_one_stream(config), report))
        try:
            yield engine.info.name, lambda request: thread.iterate(engine.generate(request))
        finally:
            thread.run(engine.close())
    finally:
        report.close()
        thread.close()


COMMAND = Command(
    usage="[--model MODEL | --address HOST:PORT] [flags]",
    summary="Talks to a model, which remembers the conversation.  Each line of a piped input is a turn.",
    add_arguments=add_arguments,
    run=run,
    epilog="""\
examples:
  jserve chat --system "Answer in one sentence."
  jserve chat --address 127.0.0.1:50051
  echo "What is a page table?" | jserve chat --temperature 0 --max-tokens 60""",
)
