"""Protos <-> dataclasses: nothing is lost, nothing is made up."""

import dataclasses
import math

import pytest

from jserve.proto_gen import inference_pb2 as pb
from jserve.request import (
    Code,
    EarlyStopping,
    FinishReason,
    GenerateRequest,
    GenerateUpdate,
    Message,
    OutputDelta,
    PositionLogprobs,
    RequestError,
    RequestMetrics,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from jserve.server import convert, convert_results

EVERY_FIELD = SamplingParams(
    n=2, best_of=3, beam_width=4, length_penalty=0.7, early_stopping=EarlyStopping.NEVER, temperature=0.1, top_p=0.9,
    top_k=-1, min_p=0.05, seed=-(2**63), max_tokens=2**40, min_tokens=1, stop=["a", "é"], stop_token_ids=[2**33, -1],
    include_stop_str_in_output=True, ignore_eos=False, repetition_penalty=1.3, presence_penalty=-2.0,
    frequency_penalty=2.0, logit_bias={5: 1.5, -1: -100.0}, allowed_token_ids=[1, 2], bad_words=["x"], logprobs=0,
    prompt_logprobs=20, skip_special_tokens=False, truncate_prompt_tokens=7, json_schema="{}", json_object=False,
    regex="a+", grammar="root ::= x", choice=["yes", "no"])


def over_the_wire(request: GenerateRequest) -> GenerateRequest:
    data = convert.request_to_proto(request).SerializeToString()
    return convert.request_from_proto(pb.GenerateRequest.FromString(data))


def test_every_sampling_field_arrives_as_it_was_sent():
    for field in dataclasses.fields(SamplingParams):
        assert getattr(EVERY_FIELD, field.name) != field.default, f"{field.name} is not set in this test"
    request = GenerateRequest(prompt="hi", sampling_params=EVERY_FIELD)
    assert over_the_wire(request) == request


@pytest.mark.parametrize("request_", [
    GenerateRequest(prompt=""),
    GenerateRequest(prompt_token_ids=[0, 49151, 2**40, -1]),
    GenerateRequest(messages=[Message("user", "<|im_end|>"), Message("assistant", "")]),
    GenerateRequest(tools=[{"type": "function", "function": {"name": "é", "n": 1}}], messages=[
        Message("assistant", "", name="a", tool_calls=[{"function": {"name": "f", "arguments": {"x": 2**60}}}]),
        Message("tool", "3", tool_call_id="1")]),
    GenerateRequest(prompt="p", request_id="r", lora_name="l", priority=-3, cache_salt="s", bypass_prefix_cache=False),
])
def test_a_request_arrives_as_it_was_sent(request_):
    assert over_the_wire(request_) == request_


@pytest.mark.parametrize("request_, field", [
    (GenerateRequest("p", sampling_params=SamplingParams(choice=[])), "sampling_params.choice"),
    (GenerateRequest("p", sampling_params=SamplingParams(allowed_token_ids=[])), "sampling_params.allowed_token_ids"),
    (GenerateRequest(prompt="p", prompt_token_ids=[]), "prompt_token_ids"),
    (GenerateRequest(prompt="p", messages=[]), "messages"),
])
def test_an_empty_list_that_the_proto_cannot_tell_from_none_is_refused_by_the_client(request_, field):
    with pytest.raises(RequestError) as refusal:
        convert.request_to_proto(request_)
    assert (refusal.value.code, refusal.value.field) == (Code.INVALID_ARGUMENT, field)


def test_zero_is_not_unset():
    zeros = SamplingParams(temperature=0.0, top_k=0, max_tokens=0, logprobs=0, seed=0, ignore_eos=False)
    assert over_the_wire(GenerateRequest(prompt="p", sampling_params=zeros)).sampling_params == zeros
    assert over_the_wire(GenerateRequest(prompt="p")).sampling_params == SamplingParams()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 1e308, 1e-45])
def test_numbers_reach_the_validator_unchanged(value):
    params = over_the_wire(GenerateRequest(prompt="p", sampling_params=SamplingParams(top_p=value))).sampling_params
    assert repr(params.top_p) == repr(value)


def test_all_inputs_that_were_set_reach_the_validator():
    request = GenerateRequest(prompt="p", prompt_token_ids=[1], messages=[Message("user", "m")])
    assert over_the_wire(request) == request


def test_deadline_and_tenant_do_not_come_from_the_message():
    assert over_the_wire(GenerateRequest(prompt="p", deadline=5.0, tenant="other")) == GenerateRequest(prompt="p")
    assert convert.request_from_proto(pb.GenerateRequest(prompt="p"), deadline=7.5).deadline == 7.5


def test_an_unknown_enum_value_is_refused_and_unspecified_is_unset():
    message = pb.GenerateRequest(prompt="p")
    message.sampling_params.early_stopping = 7
    with pytest.raises(RequestError, match=r"sampling_params.early_stopping = 7: must be one of HEURISTIC") as caught:
        convert.request_from_proto(message)
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, "sampling_params.early_stopping")
    message.sampling_params.early_stopping = 0
    assert convert.request_from_proto(message).sampling_params.early_stopping is None


@pytest.mark.parametrize(("request_", "field"), [
    (GenerateRequest(prompt="p", sampling_params=SamplingParams(n=2**70)), "sampling_params.n"),
    (GenerateRequest(prompt="p", sampling_params=SamplingParams(temperature="hot")), "sampling_params.temperature"),
    (GenerateRequest(prompt="p", sampling_params=SamplingParams(stop=[1])), "sampling_params.stop"),
    (GenerateRequest(prompt="p", sampling_params=SamplingParams(logit_bias={"a": 1})), "sampling_params.logit_bias"),
    (GenerateRequest(prompt=7), "prompt"),
    (GenerateRequest(messages=[Message("user", None), Message("user", 7)]), "messages[1].content"),
])
def test_a_client_learns_which_value_its_proto_cannot_hold(request_, field):
    with pytest.raises(RequestError) as caught:
        convert.request_to_proto(request_)
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, field)


def test_a_message_without_role_is_refused():
    with pytest.raises(RequestError, match=r"messages\[0\].role is not set"):
        convert.request_from_proto(pb.GenerateRequest(messages=[pb.Message(content="x")]))


@pytest.mark.parametrize("interval", [0, -1])
def test_a_stream_interval_below_one_is_refused(interval):
    message = convert.request_to_proto(GenerateRequest(prompt="p"), stream_interval=interval)
    with pytest.raises(RequestError, match=f"stream.interval = {interval}"):
        convert.stream_interval(message)


def logprobs(token_id: int) -> PositionLogprobs:
    chosen = TokenLogprob(token_id, -0.5, 1, "t", b"\xff\x00")
    return PositionLogprobs(chosen, (chosen, TokenLogprob(token_id + 1, -9999.0, 2, "", b"")))


ENDING = {"usage": Usage(0, 3, 0), "metrics": RequestMetrics(1.5, 2.5, None, None, 1.0, 0)}


def test_an_update_becomes_one_message_an_output_and_the_last_carries_the_ending():
    update = GenerateUpdate("r", [
        OutputDelta(0, "a", [1], [logprobs(1)], FinishReason.STOP, "STOP", -1.5),
        OutputDelta(1, "", [2, 3], None, FinishReason.STOP, 3, -2.5),
    ], **ENDING)
    messages = list(convert_results.update_to_protos(update))
    assert [message.HasField("usage") for message in messages] == [False, True]
    back = [convert_results.update_from_proto(message) for message in messages]
    assert [output for part in back for output in part.outputs] == update.outputs
    assert (back[1].usage, back[1].metrics) == (update.usage, update.metrics)


def test_an_update_without_outputs_still_carries_its_ending():
    [message] = convert_results.update_to_protos(GenerateUpdate("r", **ENDING))
    assert convert_results.update_from_proto(message) == GenerateUpdate("r", **ENDING)


def test_many_logprobs_travel_in_several_messages():
    prompt = [None, *map(logprobs, range(1, 600))]
    update = GenerateUpdate("r", [OutputDelta(0, "text", list(range(300)), list(map(logprobs, range(300))),
                                              FinishReason.LENGTH, None, -3.0)], prompt_logprobs=prompt, **ENDING)
    messages = list(convert_results.update_to_protos(update))
    assert len(messages) == 3 + 2
    back = [convert_results.update_from_proto(message) for message in messages]
    assert [entry for part in back for entry in part.prompt_logprobs or ()] == prompt
    outputs = [output for part in back for output in part.outputs]
    assert [token_id for output in outputs for token_id in output.token_ids] == list(range(300))
    assert [entry for output in outputs for entry in output.logprobs] == update.outputs[0].logprobs
    assert "".join(output.text for output in outputs) == "text"
    assert [output.finish_reason for output in outputs] == [None, FinishReason.LENGTH]


def test_a_whole_result_comes_back_as_it_was():
    result = GenerateUpdate("r", [
        OutputDelta(0, "", [], None, FinishReason.ABORTED, None, None),
        OutputDelta(1, "a", [1], [logprobs(1)], FinishReason.STOP, "x", -1.5),
    ], prompt_logprobs=[None, logprobs(2)], **ENDING)
    assert convert_results.result_from_proto(convert_results.result_to_proto(result)) == result


@pytest.mark.parametrize("text", ["{", "[1]", "1"])
def test_a_tool_that_is_no_object_is_refused_by_name(text):
    with pytest.raises(RequestError, match=r"tools\[0\] = .*must be a JSON object") as caught:
        convert.request_from_proto(pb.GenerateRequest(tools=[text]))
    assert caught.value.field == "tools[0]"
