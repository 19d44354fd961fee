"""From the flags of `jserve bench` to a load, and from a measured run to what a person asked to see of it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jserve.bench import plot, report, trace
from jserve.bench.load import JsonlLoad, Load, Output, RandomLoad, SharedPrefixLoad, TraceLoad
from jserve.bench.report import RequestRecord
from jserve.config import BadUsage, ConfigError
from jserve.request import GenerateRequest, RequestError


def load_from(arguments: argparse.Namespace) -> Load:
    """ConfigError where the file of the load is missing or cannot be read."""
    output = Output(arguments.ignore_eos, arguments.temperature)
    name, path = arguments.dataset_name, arguments.dataset_path
    if name in ("trace", "jsonl"):
        if path is None:
            raise BadUsage(f"--dataset-name {name} needs --dataset-path FILE")
        if name == "trace":
            return TraceLoad(tuple(trace.read(path)[: arguments.num_prompts]), path, output, arguments.seed)
        return JsonlLoad(tuple(_requests(path, arguments, output))[: arguments.num_prompts], path, arguments.seed)
    if path is not None:
        raise BadUsage(f"--dataset-path has no meaning with --dataset-name {name}")
    own = RandomLoad(
        num_prompts=arguments.num_prompts or arguments.default_num_prompts,
        input_len=arguments.random_input_len,
        output_len=arguments.random_output_len,
        range_ratio=arguments.random_range_ratio,
        output=output,
        seed=arguments.seed,
    )
    if name == "random":
        return own
    return SharedPrefixLoad(
        own, arguments.shared_prefix_groups, arguments.shared_prefix_len, arguments.shared_prefix_turns
    )


def deliver(
    figures: dict[str, object], records: Sequence[RequestRecord], arguments: argparse.Namespace
) -> int:
    """Prints, saves and draws; the exit code."""
    figures = labelled(figures, arguments)
    if arguments.save_detailed:
        figures = figures | report.details(records)
    if arguments.json:
        print(json.dumps(figures))
    else:
        print(report.render(figures, arguments.metric_percentiles, arguments.percentile_metrics))
    save(figures, arguments)
    if arguments.plot:
        plot.write_page(arguments.plot, figures, records)
        print(f"plot written to {arguments.plot}", file=sys.stderr)
    return 1 if figures["failed"] > arguments.allowed_failures or figures.get("stopped") else 0


def labelled(figures: dict[str, object], arguments: argparse.Namespace) -> dict[str, object]:
    """With what --label and --metadata say; a key of the report itself stays."""
    return {**dict(arguments.metadata), "label": arguments.label, **figures}


def save(figures: dict[str, object], arguments: argparse.Namespace) -> None:
    if arguments.save_result:
        path = report.save(figures, arguments.result_dir, arguments.result_filename)
        print(f"saved {path}", file=sys.stderr)


def _requests(path: str, arguments: argparse.Namespace, output: Output) -> list[GenerateRequest]:
    """One GenerateRequest a line, as `jserve batch` reads it; `output_tokens` beside a prompt, as vLLM's custom
    dataset has it, is its length.  What a line leaves open is filled from the flags."""
    from jserve.cli.request_json import json_fields, request_from_fields

    found = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            fields = json_fields(line)
            length = fields.pop("output_tokens", arguments.random_output_len)
            if not isinstance(length, int) or length < 1:
                raise ConfigError(f"{path}:{number}: output_tokens = {length!r}: expected an integer of at least 1")
            request = request_from_fields(fields)
        except RequestError as error:
            raise ConfigError(f"{path}:{number}: {error.message}") from None
        params = request.sampling_params
        unset = {"max_tokens": length, "ignore_eos": output.ignore_eos, "temperature": output.temperature}
        filled = {name: value for name, value in unset.items() if getattr(params, name) is None}
        found.append(dataclasses.replace(request, sampling_params=dataclasses.replace(params, **filled)))
    if not found:
        raise ConfigError(f"{path}: holds no request")
    return found
