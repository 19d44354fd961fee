import json
import math

import pytest

from jserve.cli.request_json import json_fields, request_from_fields, request_id_of
from jserve.request import Code, Message, RequestError


def request(line: str):
    return request_from_fields(json_fields(line.encode()))


def refusal(line: str) -> RequestError:
    with pytest.raises(RequestError) as error:
        request(line)
    assert error.value.code is Code.INVALID_ARGUMENT
    return error.value


def test_snake_case_and_camel_case_are_the_same_request():
    snake = '{"prompt_token_ids": [1, 2], "sampling_params": {"max_tokens": 3, "top_p": 0.5}, "cache_salt": "s"}'
    camel = '{"promptTokenIds": [1, 2], "samplingParams": {"maxTokens": 3, "topP": 0.5}, "cacheSalt": "s"}'
    assert request(snake) == request(camel)
    assert request(snake).sampling_params.max_tokens == 3


def test_unset_and_zero_differ():
    assert request('{"prompt": "a"}').sampling_params.temperature is None
    assert request('{"prompt": "a", "sampling_params": {"temperature": 0}}').sampling_params.temperature == 0.0


def test_messages_and_maps():
    line = '{"messages": [{"role": "user", "content": "<|im_end|>"}], "sampling_params": {"logit_bias": {"5": -1}}}'
    assert list(request(line).messages) == [Message("user", "<|im_end|>")]
    assert request(line).sampling_params.logit_bias == {5: -1}


def test_ids_only_label_results():
    assert request('{"request_id": "a", "prompt": "x"}').request_id is None
    assert request_id_of(json_fields(b'{"requestId": "a"}')) == "a"
    assert request_id_of(json_fields(b'{"request_id": 3}')) is None


def test_a_quoted_nan_reaches_the_validator():
    assert math.isnan(request('{"prompt": "a", "sampling_params": {"temperature": "NaN"}}').sampling_params.temperature)


@pytest.mark.parametrize(
    "line, field",
    [
        ('{"promt": "x"}', "promt"),
        ('{"max_tokens": 3}', "max_tokens"),
        ('{"samplingParams": {"temprature": 1}}', "sampling_params.temprature"),
        ('{"samplingParams": {"topP": "x"}}', "sampling_params.top_p"),
        ('{"sampling_params": {"temperature": NaN}}', "sampling_params.temperature"),
        ('{"sampling_params": {"ignore_eos": "true"}}', "sampling_params.ignore_eos"),
        ('{"sampling_params": {"early_stopping": "SOON"}}', "sampling_params.early_stopping"),
        ('{"sampling_params": {"stop": ["a", null]}}', "sampling_params.stop[1]"),
        ('{"prompt": 5}', "prompt"),
        ('{"prompt": "\\ud800"}', "prompt"),
        ('{"prompt_token_ids": [1.5]}', "prompt_token_ids[0]"),
        ('{"messages": [{"role": "user"}]}', "messages[0].content"),
        ('{"prompt": "x", "stream": {}}', "stream"),
        ('{"prompt": "x", "sampling_params": {"choice": []}}', "sampling_params.choice"),
        ('{"prompt": "x", "samplingParams": {"allowedTokenIds": []}}', "sampling_params.allowed_token_ids"),
        ('{"prompt": "x", "messages": []}', "messages"),
        ('{"prompt": "x", "promptTokenIds": []}', "prompt_token_ids"),
    ],
)
def test_the_field_is_named_as_the_proto_spells_it(line, field):
    error = refusal(line)
    assert error.field == field
    assert field in error.message and "\n" not in error.message


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "not a line of JSON"),
        ("[1]", "expected a JSON object"),
        ("null", "expected a JSON object"),
        ('{"prompt": "a", "prompt": "b"}', "'prompt' is there twice"),
        ('{"sampling_params": {"n": 1, "n": 2}}', "'n' is there twice"),
        ("[" * 100_000, "not a line of JSON"),
    ],
)
def test_lines_that_are_no_request(line, message):
    assert message in refusal(line).message


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(RequestError, match="not a line of JSON"):
        json_fields(b'{"prompt": "\xff"}')


def test_any_text_survives():
    text = 'tab\t null\0 \u2028 \U0001f600 "quoted" \\'
    assert request(json.dumps({"prompt": text})).prompt == text
