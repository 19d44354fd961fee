import io

import pytest

from jserve.cli import chat
from jserve.cli import main as cli
from jserve.request import Message, SamplingParams, invalid
from tests.support.fake_engine import whole_text
from tests.support.in_process import InProcessEngine, start_with


@pytest.fixture
def engine(monkeypatch):
    return start_with(InProcessEngine(num_tokens=3), monkeypatch, chat)


def say(monkeypatch, *turns: str) -> None:
    """A pipe with these lines as stdin."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{turn}\n" for turn in turns)))


def test_a_pipe_gets_one_answer_a_line_and_nothing_else_on_stdout(monkeypatch, capsys, engine):
    say(monkeypatch, "hello", "", "again")
    assert cli.main(["chat", "--system", "Be brief."]) == 0
    assert capsys.readouterr().out == f"{whole_text(3)}\n{whole_text(3)}\n"
    assert engine.closed


def test_the_model_sees_the_whole_conversation(monkeypatch, engine):
    say(monkeypatch, "one", "two")
    cli.main(["chat", "--system", "S", "--temperature", "0", "--max-tokens", "2"])
    assert list(engine.requests[1].messages) == [
        Message("system", "S"),
        Message("user", "one"),
        Message("assistant", whole_text(2)),
        Message("user", "two"),
    ]
    assert engine.requests[0].sampling_params == SamplingParams(temperature=0.0, max_tokens=2)


def test_reset_forgets_and_exit_leaves(monkeypatch, capsys, engine):
    say(monkeypatch, "one", "/reset", "two", "/help", "/exit", "three")
    assert cli.main(["chat"]) == 0
    assert [len(request.messages) for request in engine.requests] == [1, 1]
    assert "/reset" in capsys.readouterr().err


def test_a_refused_turn_is_one_line_and_not_part_of_the_conversation(monkeypatch, capsys, engine):
    original = engine.generate

    def generate(request):
        if request.messages[-1].content == "too long":
            raise invalid("messages", "...", "the prompt is too long")
        return original(request)

    engine.generate = generate
    say(monkeypatch, "one", "too long", "two")
    assert cli.main(["chat"]) == 1
    assert "INVALID_ARGUMENT: messages = '...': the prompt is too long" in capsys.readouterr().err
    assert [message.content for message in engine.requests[1].messages] == ["one", whole_text(3), "two"]


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(monkeypatch, capsys, engine):
    class Interrupts(io.StringIO):
        """Raises as the second token is printed, as Ctrl-C would."""

        def write(self, text):
            if text == "w1 " and len(engine.requests) == 1:
                raise KeyboardInterrupt
            return super().write(text)

    monkeypatch.setattr("sys.stdout", Interrupts())
    say(monkeypatch, "one", "two")
    engine.step_s = 0.01
    assert cli.main(["chat"]) == 0
    assert len(engine.aborted) == 1
    assert [message.content for message in engine.requests[1].messages] == ["one", "w0 ", "two"]


def test_the_address_of_no_server_is_one_line(monkeypatch, capsys):
    say(monkeypatch, "hello")
    assert cli.main(["chat", "--address", "127.0.0.1:1"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("jserve chat: UNAVAILABLE: ") and len(error.splitlines()) == 1
    assert "is a server there (`jserve serve`)" in error
