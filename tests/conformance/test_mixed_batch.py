"""Requests that ask for all there is to ask, in one batch: each gets what it gets alone."""

from __future__ import annotations

import dataclasses
import json

import pytest

from jserve.request import EarlyStopping, GenerateUpdate, SamplingParams
from tests.support.conformance import alone, request

pytestmark = [pytest.mark.xdist_group("conformance"), alone]

DRAWN = {"temperature": 1.2, "seed": 9, "max_tokens": 8, "ignore_eos": True}
BEAMS = {"temperature": None, "beam_width": 3, "max_tokens": 6}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
DIGITS = tuple(range(33, 42))

EACH = {
    "n": {**DRAWN, "n": 3},
    "best_of": {**DRAWN, "best_of": 3},
    "beam_width": BEAMS,
    "length_penalty": {**BEAMS, "length_penalty": 3.0},
    "early_stopping": {**BEAMS, "early_stopping": EarlyStopping.FIRST, "stop": (" ",)},
    "temperature": {**DRAWN, "temperature": 3.0},
    "top_p": {**DRAWN, "top_p": 0.7},
    "top_k": {**DRAWN, "top_k": 5},
    "min_p": {**DRAWN, "min_p": 0.1},
    "seed": {**DRAWN, "seed": -(2**63)},
    "max_tokens": {"max_tokens": 3},
    "min_tokens": {"min_tokens": 4, "logit_bias": {2: 100.0}},
    "stop": {"stop": (",", ".")},
    "stop_token_ids": {"stop_token_ids": (28, 30)},
    "include_stop_str_in_output": {"stop": (".",), "include_stop_str_in_output": True},
    "ignore_eos": {"logit_bias": {2: 100.0}, "ignore_eos": True, "max_tokens": 4},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "presence_penalty": {"presence_penalty": 2.0, "allowed_token_ids": DIGITS},
    "frequency_penalty": {"frequency_penalty": -2.0, **DRAWN},
    "logit_bias": {"logit_bias": {1000: 100.0}, "max_tokens": 4},
    "allowed_token_ids": {**DRAWN, "allowed_token_ids": (500, 600, 700)},
    "bad_words": {"bad_words": ("Paris", "the city")},
    "logprobs": {**DRAWN, "logprobs": 5},
    "prompt_logprobs": {"prompt_logprobs": 3, "max_tokens": 2},
    "skip_special_tokens": {"logit_bias": {2: 100.0}, "skip_special_tokens": False},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 2},
    "json_schema": {"json_schema": json.dumps(SCHEMA), "max_tokens": 20},
    "json_object": {**DRAWN, "json_object": True, "ignore_eos": None},
    "regex": {"regex": "[a-z ]{5,9}"},
    "grammar": {"grammar": 'start: "<" /[0-9]{1,3}/ ">"', "temperature": 1.0, "seed": 4},
    "choice": {"choice": ("perhaps", "no", "yes")},
}


def told(update: GenerateUpdate) -> list:
    """All that must be equal; log-probabilities are compared by their ids."""
    outputs = sorted(update.outputs, key=lambda output: output.index)
    scored = [entry and entry.chosen.token_id for entry in update.prompt_logprobs or ()]
    return [
        (one.index, one.token_ids, one.text, one.finish_reason, one.matched_stop,
         [[top.token_id for top in entry.top] for entry in one.logprobs or ()])
        for one in outputs
    ] + [scored, update.usage.prompt_tokens, update.usage.completion_tokens]


def test_every_field_in_one_batch_does_what_it_does_alone(ask, ask_together):
    assert EACH.keys() == {field.name for field in dataclasses.fields(SamplingParams)}
    requests = {field: request(**params) for field, params in EACH.items()}
    from_alone = {field: told(ask(**params)) for field, params in EACH.items()}
    together = ask_together(list(requests.values()))
    for field, update in zip(requests, together):
        assert told(update) == from_alone[field], field
