"""Structured output over gRPC: the text is what was asked for, greedy and drawn, and it ends there."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from jserve.request import Code, FinishReason, RequestError
from tests.support.conformance import alone, conforms, only, request
from tools.measure_structured import watched_masks

pytestmark = pytest.mark.xdist_group("conformance")

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "people": {"type": "integer", "minimum": 0, "maximum": 10**8}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
WAYS = [{}, {"temperature": 1.0, "seed": 3}]


def complete(update) -> str:
    output = only(update)
    assert output.finish_reason is FinishReason.STOP and output.matched_stop is None
    return output.text


@conforms("json_schema")
@pytest.mark.parametrize("way", WAYS, ids=["greedy", "drawn"])
def test_json_schema(ask, way):
    text = complete(ask("Tell me about Paris as JSON: ", max_tokens=80, json_schema=json.dumps(CITY), **way))
    jsonschema.validate(json.loads(text), CITY)


@conforms("json_object")
def test_json_object(ask):
    prompt = 'Write {"a": 1}\nAnswer: {"a": 1}\nWrite {"b": 2}\nAnswer:'
    assert isinstance(json.loads(complete(ask(prompt, max_tokens=60, json_object=True))), dict)
    assert not only(ask(prompt, max_tokens=60, json_object=False)).text.startswith("{")


@conforms("regex")
@pytest.mark.parametrize("way", WAYS, ids=["greedy", "drawn"])
def test_regex(ask, way):
    assert re.fullmatch(r"[A-Z]{2}-\d{4}", complete(ask(regex=r"[A-Z]{2}-\d{4}", max_tokens=20, **way)))


@conforms("choice")
def test_choice(ask):
    assert complete(ask("Is Paris in France? Answer:", choice=["perhaps", "no", "yes"])) in ("perhaps", "no", "yes")


@conforms("grammar")
def test_grammar(ask):
    text = complete(ask('2 + 2 =', max_tokens=30, grammar='start: "<" /[0-9]{1,3}/ ">"'))
    assert re.fullmatch("<[0-9]{1,3}>", text)


@alone
def test_masks_are_filled_while_the_device_computes(engine, surrounding, ask_together):
    """The logits that a mask is for are nearly always still to come when it is done."""
    many = [request(regex=f"[a-z ]{{{200 + length}}}", max_tokens=25, temperature=1.0, seed=1) for length in range(8)]
    with watched_masks(engine) as masks:
        ask_together(many)
    assert len(masks.seconds) >= 25 and sum(masks.was_hidden) > 0.7 * len(masks.was_hidden), str(masks)


@alone
def test_a_bad_schema_is_refused_with_the_place(ask):
    with pytest.raises(RequestError) as caught:
        ask(json_schema='{"properties": {"a": {"uniqueItems": true, "type": "array"}}}')
    assert caught.value.code is Code.INVALID_ARGUMENT and caught.value.field == "sampling_params.json_schema"
    assert "#/properties/a/uniqueItems" in caught.value.message
