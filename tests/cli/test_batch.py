import asyncio
import io
import json

import pytest

from jserve.cli import batch
from jserve.cli import main as cli
from tests.support.fake_engine import whole_text
from tests.support.in_process import InProcessEngine, start_with


@pytest.fixture
def engine(monkeypatch):
    return start_with(InProcessEngine(), monkeypatch, batch)


def run(tmp_path, lines, *flags, code=0) -> list[dict]:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    assert cli.main(["batch", "-i", str(source), "-o", str(target), *flags]) == code
    assert not (tmp_path / "out.jsonl.part").exists()
    return [json.loads(line) for line in target.read_text().splitlines()]


def test_one_result_a_line_in_input_order(tmp_path, engine):
    lines = [
        json.dumps({"request_id": f"r{i}", "prompt": "x", "sampling_params": {"max_tokens": 1 + i % 5}})
        for i in range(50)
    ]
    results = run(tmp_path, lines)
    assert [result["request_id"] for result in results] == [f"r{i}" for i in range(50)]
    assert [result["usage"]["completion_tokens"] for result in results] == [1 + i % 5 for i in range(50)]
    assert results[2]["outputs"] == [
        {
            "index": 0,
            "text": whole_text(3),
            "token_ids": [10, 11, 12],
            "finish_reason": "LENGTH",
            "cumulative_logprob": -1.5,
        }
    ]
    assert set(results[0]) == {"request_id", "outputs", "usage", "metrics"}
    assert engine.closed


def test_a_bad_line_is_a_result_and_the_others_go_on(tmp_path, engine):
    lines = [
        '{"request_id": "good", "prompt": "x"}',
        "{",
        '{"request_id": "bad", "prompt": "refuse me"}',
        b'{"prompt": "\xff"}',
        '{"request_id": "typo", "prompt": "x", "sampling_params": {"temprature": 1}}',
        '{"prompt": "last"}',
    ]
    results = run(tmp_path, lines)
    assert [("error" in result) for result in results] == [False, True, True, True, True, False]
    assert results[2] == {
        "request_id": "bad",
        "error": {"code": "INVALID_ARGUMENT", "field": "prompt", "message": "prompt = 'refuse me': refused"},
    }
    assert results[4]["error"]["field"] == "sampling_params.temprature"
    assert results[1]["error"]["message"].startswith("line 2: ") and results[3]["error"]["message"].startswith(
        "line 4: "
    )


def test_a_bug_costs_one_line(tmp_path, engine):
    engine.failures["boom"] = (1, ZeroDivisionError("x"))
    results = run(tmp_path, ['{"prompt": "boom"}', '{"prompt": "x"}'])
    assert results[0]["error"] == {"code": "INTERNAL", "message": "line 1: ZeroDivisionError: x"}
    assert "outputs" in results[1]


def test_blank_lines_byte_order_mark_and_crlf(tmp_path, engine):
    results = run(tmp_path, [b'\xef\xbb\xbf{"prompt": "x"}\r', b"", b"  \r", b'{"prompt": "y"}\r', b""])
    assert len(results) == 2 and not any("error" in result for result in results)
    assert run(tmp_path, [b""]) == []


def test_equal_ids_may_run_at_the_same_time(tmp_path, engine):
    results = run(tmp_path, ['{"request_id": "same", "prompt": "x"}'] * 6)
    assert [result["request_id"] for result in results] == ["same"] * 6
    assert all("outputs" in result for result in results)


def test_logprobs_and_prompt_logprobs_are_in_the_result(tmp_path, engine):
    line = '{"prompt": "ab", "sampling_params": {"max_tokens": 1, "logprobs": 1, "prompt_logprobs": 0}}'
    result = run(tmp_path, [line])[0]
    entry = {"token_id": 10, "logprob": -0.5, "rank": 1, "text": "t0", "bytes": "/wA="}
    assert result["outputs"][0]["logprobs"] == [{"chosen": entry, "top": [entry]}]
    assert result["prompt_logprobs"][0] == {} and len(result["prompt_logprobs"]) == 2


def test_no_more_than_the_limit_is_in_the_engine(tmp_path, engine):
    engine.step_s = 0.01
    run(tmp_path, ['{"prompt": "x"}'] * 40)
    assert engine.most_open == 2 * engine.info.max_num_seqs
    engine.most_open = 0
    run(tmp_path, ['{"prompt": "x"}'] * 40, "--max-in-flight", "3")
    assert engine.most_open == 3
    engine.most_open = 0
    run(tmp_path, ['{"prompt": "x"}'] * 40, "--scheduler.max_waiting", "2")
    assert engine.most_open == 2


async def test_reading_waits_for_results_that_are_held_up():
    """The first request hangs: only so many results are held in memory, however long the file is."""
    engine, num_read, limit = InProcessEngine(), 0, 2
    engine.failures["slow"] = (0, None)

    async def lines():
        nonlocal num_read
        for number in range(1000):
            num_read = number + 1
            yield number + 1, b'{"prompt": "slow"}' if number == 0 else b'{"prompt": "x"}'

    original = engine.generate

    def generate(request):
        return hang() if request.prompt == "slow" else original(request)

    async def hang():
        await asyncio.Event().wait()
        yield

    engine.generate = generate
    answers = batch.answers(engine, lines(), limit)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(answers), 0.5)
    assert num_read <= batch.RESULTS_HELD_PER_RUNNING * limit + 1


def test_stdin_to_stdout(monkeypatch, capsys, engine):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "x"}\n')))
    assert cli.main(["batch", "-i", "-", "-o", "-"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["outputs"][0]["text"] == whole_text(5)
    assert output.err.splitlines()[-1].startswith("1 results, 0 of them errors; 5 tokens in ")


def test_an_interrupted_run_leaves_the_old_results_alone(tmp_path, capsys, engine):
    (tmp_path / "out.jsonl").write_text("old\n")
    engine.failures["stop"] = (0, KeyboardInterrupt())
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n' * 3 + '{"prompt": "stop"}\n')
    try:
        assert cli.main(["batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]) == 130
    except KeyboardInterrupt:
        pytest.fail("the interrupt came through")
    assert (tmp_path / "out.jsonl").read_text() == "old\n"


@pytest.mark.parametrize(
    "flags, code, message",
    [
        (["-i", "nothing.jsonl", "-o", "out.jsonl"], 1, "--input nothing.jsonl: No such file or directory"),
        (["-i", "in.jsonl", "-o", "nowhere/out.jsonl"], 1, "--output nowhere/out.jsonl: cannot write"),
        (["-i", "in.jsonl", "-o", "in.jsonl"], 2, "--output in.jsonl: is the input file"),
        (["-i", ".", "-o", "out.jsonl"], 1, "--input .: Is a directory"),
    ],
)
def test_files_are_checked_before_the_model_is_loaded(tmp_path, monkeypatch, capsys, flags, code, message):
    async def start_engine(config, report):
        pytest.fail("the model was loaded")

    monkeypatch.setattr(batch, "start_engine", start_engine)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    assert cli.main(["batch", *flags]) == code
    assert message in capsys.readouterr().err
    assert (tmp_path / "in.jsonl").read_text() == '{"prompt": "x"}\n'


def test_missing_flags_are_bad_usage(capsys):
    assert cli.main(["batch", "-i", "x"]) == 2
    assert cli.main(["batch", "-i", "x", "-o", "y", "--max-in-flight", "0"]) == 2
