"""Flags of generate and chat that become SamplingParams.  Unset stays unset; the engine judges the values."""

from __future__ import annotations

import argparse

from jserve.request import SamplingParams

_NUMBERS = (
    ("max_tokens", int, "N", "most tokens to generate"),
    ("min_tokens", int, "N", "fewest tokens before it may stop"),
    ("temperature", float, "T", "0 always takes the most probable token"),
    ("top_p", float, "P", "sample from the most probable tokens that sum to P"),
    ("top_k", int, "K", "sample from the K most probable tokens"),
    ("min_p", float, "P", "drop tokens less probable than P x the best"),
    ("seed", int, "N", "same seed, same tokens"),
    ("repetition_penalty", float, "X", "above 1: fewer repetitions of prompt and output"),
    ("presence_penalty", float, "X", "above 0: new words"),
    ("frequency_penalty", float, "X", "above 0: fewer repetitions of the output"),
)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (unset: the model's own defaults)")
    for name, kind, metavar, text in _NUMBERS:
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="stop before TEXT; may be given again"
    )
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on after the model's end token")


def sampling_params(arguments: argparse.Namespace, **more: object) -> SamplingParams:
    values = {name: getattr(arguments, name) for name, *_ in _NUMBERS}
    return SamplingParams(**values, stop=tuple(arguments.stop), ignore_eos=arguments.ignore_eos, **more)
