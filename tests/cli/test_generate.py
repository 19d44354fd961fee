import io
import json

import pytest

from jserve.cli import generate
from jserve.cli import main as cli
from jserve.cli.sampling_flags import _NUMBERS
from jserve.request import Message, SamplingParams
from tests.support.fake_engine import whole_text
from tests.support.in_process import InProcessEngine, start_with


@pytest.fixture
def engine(monkeypatch):
    return start_with(InProcessEngine(), monkeypatch, generate)


def test_text_goes_to_stdout_and_the_start_to_stderr(capsys, engine):
    assert cli.main(["generate", "hello", "--max-tokens", "3", "--temperature", "0"]) == 0
    output = capsys.readouterr()
    assert output.out == whole_text(3) + "\n" and output.err == "starting\n"
    assert engine.requests[0].prompt == "hello" and engine.closed


def test_quiet_says_nothing_of_the_start(capsys, engine):
    cli.main(["generate", "hello", "-q"])
    assert capsys.readouterr().err == ""


def test_json_is_one_object(capsys, engine):
    assert cli.main(["generate", "hello", "--json", "-n", "2", "--logprobs", "0", "--stop", "a", "--stop", "b"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [output["text"] for output in result["outputs"]] == [whole_text(5)] * 2
    assert len(result["outputs"][0]["logprobs"]) == 5
    assert engine.requests[0].sampling_params.stop == ("a", "b")


def test_several_outputs_are_told_apart(capsys, engine):
    cli.main(["generate", "hello", "-n", "2"])
    assert capsys.readouterr().out == f"--- 0\n{whole_text(5)}\n--- 1\n{whole_text(5)}\n"


def test_chat_sends_a_user_message(engine):
    cli.main(["generate", "--chat", "hello"])
    assert list(engine.requests[0].messages) == [Message("user", "hello")]


def test_a_prompt_can_come_through_a_pipe(monkeypatch, engine):
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    cli.main(["generate"])
    assert engine.requests[0].prompt == "from a pipe"


def test_a_refused_request_is_one_line(capsys, engine):
    assert cli.main(["generate", "refuse me", "-q"]) == 1
    assert capsys.readouterr().err == "jserve generate: INVALID_ARGUMENT: prompt = 'refuse me': refused\n"
    assert engine.closed


def test_every_sampling_flag_reaches_the_engine(engine):
    flags = {"max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": -7,
             "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": -0.3}
    spelled = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    cli.main(["generate", "hello", "-n", "2", "--stop", "a", "--ignore-eos", *spelled])
    expected = SamplingParams(n=2, stop=("a",), ignore_eos=True, **flags)
    assert engine.requests[0].sampling_params == expected
    assert len(spelled) == len(_NUMBERS)


def test_logprobs_have_no_place_in_text(capsys, engine):
    assert cli.main(["generate", "hello", "--logprobs", "2"]) == 2
    assert "--logprobs needs --json" in capsys.readouterr().err and engine.requests == []


def test_flags_reach_the_engine(engine):
    cli.main(["generate", "hello", "--model", "m.gguf", "--no-overlap"])
    assert engine.config.model.path == "m.gguf" and engine.config.scheduler.overlap is False


def test_one_stream_needs_few_shapes_unless_told_otherwise(engine):
    cli.main(["generate", "hello", "-n", "3"])
    assert engine.config.scheduler.max_num_seqs == 3 and engine.config.compile.token_buckets == (16, 128)
    cli.main(["generate", "hello", "--max-num-seqs", "8", "--max-num-batched-tokens", "64"])
    assert engine.config.scheduler.max_num_seqs == 8 and engine.config.compile.token_buckets == (16,)
    cli.main(["generate", "hello", "--compile.token_buckets", "32"])
    assert engine.config.compile.token_buckets == (32,)


def test_no_prompt_at_a_terminal_is_bad_usage(monkeypatch, capsys):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    assert cli.main(["generate"]) == 2
    assert "give a prompt" in capsys.readouterr().err
