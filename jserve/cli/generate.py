"""`jserve generate "prompt"`: one prompt, in this process, streamed to stdout."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

from jserve.cli.command import Command
from jserve.cli.flags import add_config_flags, config_from
from jserve.cli.progress import StartReport
from jserve.cli.sampling_flags import add_sampling_flags, sampling_params
from jserve.config import BadUsage, Config
from jserve.local_engine import for_one_stream, start_engine
from jserve.request import GenerateRequest, GenerateUpdate, Message
from jserve.results import RequestOutput, collect


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the text to continue; - or nothing reads it from stdin")
    parser.add_argument("--chat", action="store_true", help="send it as a user's message through the chat template")
    parser.add_argument("-n", type=int, metavar="N", help="number of outputs")
    parser.add_argument("--logprobs", type=int, metavar="K", help="with --json: log-probabilities of the K best tokens")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("-q", "--quiet", action="store_true", help="say nothing while the engine starts")
    add_sampling_flags(parser)
    add_config_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    prompt = arguments.prompt
    if prompt is None and sys.stdin.isatty():
        print("jserve generate: give a prompt, or pipe one in\ntry: jserve generate --help", file=sys.stderr)
        return 2
    if arguments.logprobs is not None and not arguments.json:
        raise BadUsage("--logprobs needs --json: text has no place for them")
    if prompt is None or prompt == "-":
        prompt = sys.stdin.read()
    params = sampling_params(arguments, n=arguments.n, logprobs=arguments.logprobs)
    if arguments.chat:
        request = GenerateRequest(messages=[Message("user", prompt)], sampling_params=params)
    else:
        request = GenerateRequest(prompt=prompt, sampling_params=params)
    config = for_one_stream(config_from(arguments), arguments.n or 1)
    return asyncio.run(_generate(config, request, StartReport(quiet=arguments.quiet), as_json=arguments.json))


async def _generate(config: Config, request: GenerateRequest, report: StartReport, as_json: bool) -> int:
    engine = await start_engine(config, report)
    try:
        one_output = (request.sampling_params.n or 1) == 1
        updates = engine.generate(request)
        result = await collect(request, _printed(updates) if one_output and not as_json else updates)
    finally:
        await engine.close()
    if as_json:
        from jserve.cli.result_json import result_to_json

        print(json.dumps(result_to_json(result), ensure_ascii=False))
    elif one_output:
        print()
    else:
        _print_outputs(result)
    return 0


async def _printed(updates):
    """The updates, each one's text written as it comes."""
    async for update in updates:
        _write(update)
        yield update


def _write(update: GenerateUpdate) -> None:
    text = "".join(output.text for output in update.outputs)
    if text:
        print(text, end="", flush=True)


def _print_outputs(result: RequestOutput) -> None:
    for output in result.outputs:
        print(f"--- {output.index}\n{output.text}")


COMMAND = Command(
    usage='"PROMPT" [--model MODEL] [flags]',
    summary="Continues one prompt in this process and streams the text to stdout.",
    add_arguments=add_arguments,
    run=run,
    epilog="""\
examples:
  jserve generate "The capital of France is" --max-tokens 20
  jserve generate --chat "Explain paging in one sentence." --temperature 0
  cat article.txt | jserve generate --json --max-tokens 100""",
)
