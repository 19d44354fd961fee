"""Bytes that are no request: the answer says what is wrong with them."""

import random

import pytest

from jserve.proto_gen import inference_pb2 as pb
from jserve.request import Code, RequestError
from jserve.server.decode import decoder

decode = decoder(pb.GenerateRequest.DESCRIPTOR)


def with_bad_utf8(message: pb.GenerateRequest) -> bytes:
    data = message.SerializeToString()
    assert data.count(b"BAD!") == 1
    return data.replace(b"BAD!", b"\xff\xfe\xfd\xfc")


@pytest.mark.parametrize(("message", "path"), [
    (pb.GenerateRequest(prompt="BAD!"), "prompt"),
    (pb.GenerateRequest(request_id="r", messages=[pb.Message(role="u", content="ok"), pb.Message(content="BAD!")]),
     "messages[1].content"),
    (pb.GenerateRequest(prompt="p", sampling_params={"temperature": 1.5, "seed": -1, "stop": ["é", "BAD!"]}),
     "sampling_params.stop[1]"),
])
def test_a_string_that_is_not_utf8_is_named(message, path):
    error = decode(with_bad_utf8(message))
    assert isinstance(error, RequestError)
    assert (error.code, error.field, error.message) == (Code.INVALID_ARGUMENT, path, f"{path}: not valid UTF-8")


@pytest.mark.parametrize("data", [b"\xff", b"\x12\x7fabc", b"\x12", b"\x0b", b"\x80" * 12])
def test_bytes_that_are_no_protobuf_are_refused(data):
    error = decode(data)
    assert isinstance(error, RequestError)
    assert error.message == "the request is not a valid jserve.v1.GenerateRequest message"


@pytest.mark.parametrize(("data", "field", "where"), [
    (b"\x98\x06\x01", "99", "GenerateRequest"),
    (pb.GenerateRequest(prompt="p").SerializeToString() + b"\x2a\x03\xf8\x06\x01", "sampling_params.111",
     "sampling_params"),
    (b"\x22\x00\x22\x03\xf8\x06\x01", "messages[1].111", "messages[1]"),
])
def test_an_unknown_field_is_refused_by_number(data, field, where):
    error = decode(data)
    assert isinstance(error, RequestError)
    assert (error.code, error.field) == (Code.INVALID_ARGUMENT, field)
    assert error.message.startswith(f"{where}: field number {field.rpartition('.')[2]} is not known")


def test_what_is_valid_comes_through():
    message = pb.GenerateRequest(prompt="é", sampling_params={"logit_bias": {1: 2.0}, "stop": ["x"]})
    assert decode(message.SerializeToString()) == message


def test_any_bytes_give_a_message_or_an_error():
    """Random bytes, and valid requests with a few bytes changed."""
    draw = random.Random(0)
    valid = pb.GenerateRequest(prompt="p" * 20, messages=[pb.Message(role="r", content="c")],
                               sampling_params={"n": 3, "stop": ["a", "b"], "logit_bias": {3: 4.0}}).SerializeToString()
    outcomes = set()
    for _ in range(5000):
        data = bytearray(valid) if draw.random() < 0.7 else bytearray(draw.randbytes(draw.randrange(40)))
        for _ in range(draw.randrange(4)):
            if data:
                data[draw.randrange(len(data))] = draw.randrange(256)
        outcomes.add(type(decode(bytes(data))))
    assert outcomes == {pb.GenerateRequest, RequestError}
