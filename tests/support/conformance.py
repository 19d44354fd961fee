"""What conformance tests share: the mark by which each field finds its test, and short ways to ask and to read."""

from __future__ import annotations

import pytest

from jserve.request import GenerateRequest, GenerateUpdate, OutputDelta, SamplingParams

PROMPT = "The capital of France is"
alone = pytest.mark.parametrize("surrounding", ["smallest"], indirect=True)
"""Of tests that bring their own neighbours, or that no sampler changes: one run instead of one a surrounding."""


def conforms(*fields: str):
    """Marks the conformance test of these fields of SamplingParams; test_every_field reads the marks from the source."""
    return lambda test: test


def request(prompt: str | list[int] = PROMPT, **params) -> GenerateRequest:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **params})
    if isinstance(prompt, str):
        return GenerateRequest(prompt=prompt, sampling_params=params)
    return GenerateRequest(prompt_token_ids=prompt, sampling_params=params)


def only(update: GenerateUpdate) -> OutputDelta:
    """The one output of an answer."""
    [output] = update.outputs
    return output


def ids(update: GenerateUpdate) -> list[int]:
    return only(update).token_ids
