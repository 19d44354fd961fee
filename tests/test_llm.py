import threading

import numpy as np
import pytest

from jserve import LLM, Config, ConfigError, RequestError, SamplingParams
from jserve import llm as llm_module
from tests.support.fake_engine import whole_text
from tests.support.in_process import InProcessEngine, start_with


@pytest.fixture
def engine(monkeypatch):
    return start_with(InProcessEngine(), monkeypatch, llm_module)


@pytest.fixture
def llm(engine):
    with LLM("some-model") as llm:
        yield llm


def test_one_prompt_gives_one_output(llm):
    (output,) = llm.generate("ab", SamplingParams(max_tokens=3))
    assert output.prompt == "ab" and output.prompt_token_ids == [256, 97, 98]
    (completion,) = output.outputs
    assert (completion.index, completion.text, completion.token_ids) == (0, whole_text(3), [10, 11, 12])
    assert completion.finish_reason == "length" and completion.cumulative_logprob == -1.5
    assert output.usage.completion_tokens == 3 and output.metrics.num_preemptions == 0
    assert completion.logprobs is None and output.prompt_logprobs is None


def test_every_kind_of_prompt(llm, engine):
    outputs = llm.generate(
        [
            "text",
            [5, 6, 7],
            {"prompt": "text", "priority": 3},
            {"messages": [{"role": "user", "content": "hi"}]},
        ]
    )
    assert [output.prompt_token_ids for output in outputs] == [
        [256, *b"text"],
        [5, 6, 7],
        [256, *b"text"],
        list(b"<user>hi<assistant>"),
    ]
    assert {request.priority for request in engine.requests} == {None, 3}


def test_a_chat_shows_its_tools_to_the_template(llm, engine):
    tool = {"type": "function", "function": {"name": "f"}}
    turns = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
             {"role": "tool", "content": "3", "tool_call_id": "1"}]
    (output,) = llm.chat(turns, tools=[tool])
    assert bytes(output.prompt_token_ids).decode() == "[f]<assistant><tool>3<assistant>"
    [asked] = engine.requests
    assert asked.tools == [tool] and asked.messages[0].tool_calls and asked.messages[1].tool_call_id == "1"


def test_a_list_of_ids_is_one_prompt_and_an_empty_list_is_none(llm):
    assert len(llm.generate([5, 6, 7])) == 1
    assert llm.generate([]) == []


def test_outputs_are_in_the_order_of_the_prompts(llm, engine):
    params = [SamplingParams(max_tokens=1 + i % 7) for i in range(40)]
    outputs = llm.generate(["x"] * 40, params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1 + i % 7 for i in range(40)]
    assert len({output.request_id for output in outputs}) == 40


def test_no_more_than_the_engine_accepts_is_in_flight(engine):
    engine.step_s = 0.002
    with LLM("m", scheduler={"max_waiting": 3}) as llm:
        llm.generate(["x"] * 20)
    assert engine.most_open == 3


def test_n_outputs(llm):
    (output,) = llm.generate("x", SamplingParams(n=3, logprobs=1, prompt_logprobs=0, max_tokens=2))
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert all(len(completion.logprobs) == 2 for completion in output.outputs)
    assert output.prompt_logprobs[0] is None


def test_chat_takes_one_conversation_or_several(llm):
    turn = [{"role": "user", "content": "hi"}]
    assert len(llm.chat(turn)) == 1
    assert len(llm.chat([turn, turn])) == 2


def test_a_refused_prompt_raises_and_the_others_are_stopped(llm, engine):
    engine.step_s = 0.05
    with pytest.raises(RequestError, match="refuse me"):
        llm.generate(["x", "refuse me", "y"])
    assert engine.running == set() and len(engine.aborted) >= 1
    engine.step_s = 0
    assert llm.generate("x")[0].outputs[0].text == whole_text(5)


def test_params_and_prompts_must_match(llm):
    with pytest.raises(ValueError, match="2 sampling_params for 3 prompts"):
        llm.generate(["a", "b", "c"], [SamplingParams()] * 2)


def test_unknown_keys_of_a_prompt_are_refused(llm):
    with pytest.raises(RequestError, match="promt = 'x': unknown key of a prompt"):
        llm.generate({"promt": "x"})
    with pytest.raises(RequestError, match="each message has role and content"):
        llm.chat([{"role": "user"}])


@pytest.mark.parametrize("prompts", [[1, 2.5], [[1, 2.5]], [None], [["a"]]])
def test_what_is_no_prompt_is_named(llm, prompts):
    with pytest.raises(RequestError, match="a prompt is text, a list of token ids, or a dict"):
        llm.generate(prompts)


def test_token_ids_may_be_numpy_integers(llm, engine):
    llm.generate(np.arange(5, 8))
    assert engine.requests[0].prompt_token_ids == [5, 6, 7]
    assert type(engine.requests[0].prompt_token_ids[0]) is int


def test_sections_override_the_config(engine):
    with LLM("m", config=Config().replace("kv", block_size=8), kv={"num_blocks": 5}, compile={"token_buckets": [16]}):
        assert engine.config.kv.block_size == 8 and engine.config.kv.num_blocks == 5
        assert engine.config.compile.token_buckets == (16,) and engine.config.model.path == "m"
    with pytest.raises(ConfigError, match="did you mean kv.block_size"):
        LLM("m", kv={"blok_size": 8})
    with pytest.raises(ConfigError, match="unknown section"):
        LLM("m", block_size=8)


def test_closing_ends_the_threads_and_later_calls_are_refused(engine):
    before = threading.active_count()
    llm = LLM("m")
    llm.generate("x")
    llm.close()
    llm.close()
    assert engine.closed and threading.active_count() == before
    with pytest.raises(RequestError, match="closed"):
        llm.generate("x")


def test_a_failed_start_leaves_no_thread(monkeypatch):
    async def start_engine(config, report):
        raise ConfigError("no such model")

    monkeypatch.setattr(llm_module, "start_engine", start_engine)
    before = threading.active_count()
    with pytest.raises(ConfigError):
        LLM("m")
    assert threading.active_count() == before


def test_the_start_reports_lines(engine):
    lines = []
    LLM("m", report=lines.append).close()
    assert lines == ["starting"]
