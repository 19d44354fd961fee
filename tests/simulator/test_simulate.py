"""The simulator: the source document's toy figures, chunked prefill's worth, and a hundred thousand requests."""

from __future__ import annotations

import json
import re
import time
import xml.dom.minidom

import numpy as np
import pytest

from jserve.bench.report import summarize
from jserve.cli import main as cli
from jserve.planner.devices import find_device
from jserve.planner.roofline import Roofline
from jserve.planner.shapes import find_model
from jserve.simulator import workload
from jserve.simulator.baselines import StaticBatching, WholePrefill
from jserve.simulator.capacity import find_capacity
from jserve.simulator.clock import simulate
from jserve.simulator.engine import EngineSettings, EngineSystem
from jserve.simulator.steps import one_second, roofline_seconds, table_seconds
from jserve.simulator.workload import SimRequest

LLAMA = Roofline(find_model("llama-3-8b"), find_device("h100-80gb"))


def simulated(capsys, *flags: str) -> dict:
    assert cli.main(["bench", "simulate", *flags, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["systems"]


def test_eight_requests_in_four_rows_take_14_static_steps_and_12_continuous_ones(capsys):
    systems = simulated(capsys, "--device", "unit", "--rows", "4", "--outputs", "2,5,3,8,4,3,5,6")
    static, ours = systems["static"], systems["jserve"]
    assert (static["num_steps"], round(static["useful_place_share"], 2), static["first_step_of_fifth"]) == (14, 0.64, 9)
    assert (ours["num_steps"], ours["useful_place_share"], ours["first_step_of_fifth"]) == (12, 0.75, 3)
    assert systems["preallocated"]["num_steps"] == 12


def test_static_batching_of_skewed_outputs_is_28_percent_useful_and_a_full_queue_yields_3_5x(capsys):
    flags = ("--device", "unit", "--rows", "4", "--outputs", "10,50,200,2000", "--system", "static,jserve")
    assert simulated(capsys, *flags)["static"]["useful_place_share"] == 0.2825
    systems = simulated(capsys, *flags, "--repeat", "20")
    gain = systems["jserve"]["output_throughput"] / systems["static"]["output_throughput"]
    assert 3.3 < gain <= 1 / 0.2825  # the rest is the tail, when the queue is empty


def test_chunks_keep_the_gap_ten_times_shorter_at_the_same_throughput(capsys):
    systems = simulated(
        capsys, "--model", "llama-3-8b", "--device", "h100-80gb", "--dataset-name", "stalls", "--compute-efficiency",
        "0.5", "--stream-context", "9500", "--num-long", "6", "--system", "jserve,whole-prefill",
    )
    ours, whole = systems["jserve"], systems["whole-prefill"]
    assert whole["stall_share"] > 0.01, "stalls are over 1% of the gaps"
    assert whole["p99_stream_itl_ms"] >= 10 * ours["p99_stream_itl_ms"]
    assert whole["p99_stream_itl_during_prefill_ms"] >= 10 * ours["p99_stream_itl_during_prefill_ms"]
    assert whole["p99_stream_itl_ms"] == pytest.approx(1_500, rel=0.02), "1.5 s at half the matrix rate"
    assert ours["total_token_throughput"] == pytest.approx(whole["total_token_throughput"], rel=0.05)
    assert ours["output_throughput"] >= whole["output_throughput"]


def test_steps_have_a_near_constant_number_of_tokens_while_prompts_wait():
    requests = workload.uniform_lengths(150, 2000, 24, 0.5, 0).requests([0.0] * 150)
    whole = WholePrefill("w", num_rows=64, num_blocks=25_719, block_size=16, max_context=8192, budget=8192, mix=False)
    spread = {}
    for system in (EngineSystem(EngineSettings(25_720, 16, 8192, 2048, 64, step_cost_tokens=295)), whole):
        run = simulate(system, requests, roofline_seconds(LLAMA))
        last_entry = max(run.first_steps.values())
        tokens = np.array(run.step_useful[: last_entry - 1])
        spread[system.name] = tokens.std() / tokens.mean()
    assert spread["jserve"] < 0.02 and spread["w"] > 0.5


def test_paging_holds_more_sequences_than_preallocation(capsys):
    flags = ("--model", "llama-3-8b", "--max-num-seqs", "512", "--num-prompts", "600", "--context", "8192")
    systems = simulated(capsys, *flags, "--random-input-len", "500", "--random-output-len", "60")
    assert systems["preallocated"]["num_rows"] == 50
    assert systems["jserve"]["output_throughput"] > systems["preallocated"]["output_throughput"]
    assert systems["static"]["output_throughput"] < systems["preallocated"]["output_throughput"]


def test_our_capacity_under_a_gap_target_is_above_that_of_whole_prefills():
    lengths = workload.lognormal_lengths(120, 0, context=8192)
    seconds = roofline_seconds(LLAMA)
    ours = lambda: EngineSystem(EngineSettings(25_720, 16, 8192, 512, 256, step_cost_tokens=295))
    whole = lambda: WholePrefill(
        "whole-prefill", num_rows=256, num_blocks=25_719, block_size=16, max_context=8192, budget=8192, mix=False
    )
    search = dict(num_halvings=1, lowest=4.0)
    found = [find_capacity(name, make, lengths, seconds, 0.05, **search) for name, make in (("o", ours), ("w", whole))]
    assert found[0].rate >= 2 * max(found[1].rate, 4.0)


def test_a_hundred_thousand_requests_take_a_minute_of_cpu_and_every_step_keeps_the_rules():
    count = 100_000
    requests = workload.uniform_lengths(count, 48, 8, 0.5, 0).requests(workload.arrival_times(count, 4_000, 1.0, 0))
    system = EngineSystem(EngineSettings(25_720, 16, 8192, 2048, 256, step_cost_tokens=295))
    began = time.process_time()
    run = simulate(system, requests, roofline_seconds(LLAMA))
    assert time.process_time() - began < 60
    assert [len(run.token_times[one.number]) for one in requests] == [one.output for one in requests]
    assert system.scheduler.blocks.num_used_blocks == 0 and not run.refused
    assert run.useful_share > 0.9
    assert 0 < min(run.step_useful) and max(run.step_useful) <= 2048, "progress in every step, within the budget"
    entered = [run.first_steps[one.number] for one in requests]
    assert entered == sorted(entered), "first come, first served"
    times = np.concatenate([run.token_times[one.number] for one in requests])
    step_of_token = np.searchsorted(run.step_ends, times)
    is_first = np.zeros(len(times), bool)
    is_first[np.cumsum([0, *(one.output for one in requests[:-1])])] = True
    assert (np.diff(step_of_token)[~is_first[1:]] == 1).all(), "a decode missed a step"


def test_simulated_time_is_the_roofline_of_every_step():
    system = EngineSystem(EngineSettings(1_000, 16, 8192, 2048, 256, overlap=False))
    run = simulate(system, [SimRequest(0, 1.5, 2048, 3)], roofline_seconds(LLAMA))
    first = 1.5 + LLAMA.step(np.array([2048]), np.array([0]), 2048).seconds
    assert run.token_times[0][0] == pytest.approx(first)
    assert run.token_times[0][1] == pytest.approx(first + LLAMA.decode(1, 2049).seconds)


@pytest.mark.parametrize("overlap", [False, True])
def test_overlap_costs_no_token_and_no_gap_in_device_time(overlap):
    settings = EngineSettings(400, 16, 512, 64, 8, overlap=overlap)
    requests = workload.uniform_lengths(40, 30, 12, 0.5, 1).requests([0.0] * 40)
    run = simulate(EngineSystem(settings), requests, one_second)
    assert sum(map(len, run.token_times.values())) == sum(one.output for one in requests)
    assert run.step_ends == [float(1 + at) for at in range(run.num_steps)]


def test_a_closed_loop_keeps_so_many_requests_open():
    requests = workload.uniform_lengths(30, 8, 6, 0.0, 0).requests([0.0] * 30)
    run = simulate(EngineSystem(EngineSettings(400, 16, 64, 64, 16)), requests, one_second, concurrency=3)
    figures = summarize(run.records())
    assert figures["completed"] == 30 and figures["max_concurrent_requests"] == 3


def test_baselines_finish_what_they_accept_and_preempt_where_blocks_run_out():
    requests = workload.uniform_lengths(30, 20, 30, 0.5, 3).requests([0.0] * 30)
    paged = WholePrefill("p", num_rows=8, num_blocks=12, block_size=8, max_context=96, budget=96, mix=False)
    for system in (paged, StaticBatching(4, 96)):
        run = simulate(system, requests, one_second)
        assert [len(run.token_times[one.number]) for one in requests] == [one.output for one in requests]
    assert paged.num_preemptions > 0


def test_a_request_that_can_never_fit_is_counted_as_failed(capsys):
    flags = ("--model", "llama-3-8b", "--random-input-len", "9000", "--random-output-len", "8", "--num-prompts", "2")
    for figures in simulated(capsys, *flags).values():
        assert figures["completed"] == 0 and figures["errors"] == {"RESOURCE_EXHAUSTED": 2}


def test_the_picture_shows_every_request_in_its_row(tmp_path, capsys):
    page = tmp_path / "gantt.html"
    flags = ["--device", "unit", "--rows", "4", "--outputs", "2,5,3,8,4,3,5,6", "--plot", str(page)]
    assert cli.main(["bench", "simulate", *flags]) == 0
    text = page.read_text()
    drawings = re.findall("<svg.*?</svg>", text, re.S)
    assert len(drawings) == 4 and "14 steps" in text and "12 steps" in text
    assert re.findall(r"text-anchor='middle'>([^<]*)<", drawings[0]) == ["0", "2", "4", "6", "8", "10", "12", "14"]
    for drawing in drawings:
        xml.dom.minidom.parseString(drawing)
        assert all(f">{letter}</text>" in drawing for letter in "ABCDEFGH")


def test_arrivals_have_the_rate_and_burstiness_that_were_asked():
    for burstiness in (0.25, 1.0, 4.0):
        gaps = np.diff(workload.arrival_times(20_000, 5.0, burstiness, 0))
        assert gaps.mean() == pytest.approx(0.2, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_a_trace_gives_requests_and_a_bad_line_is_named(tmp_path, capsys):
    trace = tmp_path / "lengths.jsonl"
    trace.write_text('{"prompt_tokens": 5, "output_tokens": 2, "arrival": 9}\n\n{"input_len": 7, "arrival": 8.5}\n')
    requests, timed = workload.read_trace(trace)
    assert timed and [(one.arrival, one.prompt, one.output) for one in requests] == [(0.0, 7, 1), (0.5, 5, 2)]
    trace.write_text('{"prompt_tokens": 5}\n{"prompt_tokens": "x"}\n')
    flags = ["--device", "unit", "--dataset-name", "trace", "--dataset-path", str(trace)]
    assert cli.main(["bench", "simulate", *flags]) == 1
    assert "lengths.jsonl:2: prompt_tokens = 'x'" in capsys.readouterr().err


def test_a_measured_table_is_interpolated(tmp_path):
    path = tmp_path / "table.json"
    path.write_text('{"tokens_ms": [[1, 5], [101, 15]], "context_ms_per_1k": 1}')
    system = EngineSystem(EngineSettings(400, 16, 512, 64, 8, overlap=False))
    system.add(SimRequest(0, 0.0, 33, 2))
    step = system.schedule(0.0)
    base = 5 + 0.1 * (step.num_tokens - 1)
    assert table_seconds(path)(step) == pytest.approx((base + step.num_useful / 1000) / 1e3)


def test_planned_buckets_pad_less_than_as_many_powers_of_two(tmp_path, capsys):
    trace = tmp_path / "lengths.jsonl"
    random = np.random.default_rng(0)
    lengths = random.choice([70, 300, 900], 120, p=[0.5, 0.4, 0.1])
    trace.write_text("\n".join(json.dumps({"prompt_tokens": int(n), "output_tokens": 40}) for n in lengths))
    flags = ["plan", "--trace", str(trace), "--max-compiles", "3", "--max-num-seqs", "8", "--budget", "1024"]
    assert cli.main([*flags, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["token_buckets"]) <= 3 and answer["token_buckets"][-1] == 1024
    assert answer["padded_share"] < answer["padded_share_powers"]
    assert cli.main(flags) == 0
    listed = ",".join(map(str, answer["token_buckets"]))
    assert f"--compile.token_buckets {listed}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--system", "best"], "expected all, or some of"),
        (["--dataset-name", "trace", "--device", "unit"], "needs --dataset-path"),
        (["--dataset-name", "stalls", "--device", "unit"], "needs --model"),
        (["--num-prompts", "3"], "--model is missing"),
        (["--model", "llama-3-8b", "--goodput", "speed:3"], "expected some of ttft"),
        (["--model", "llama-3-8b", "--capacity", "50", "--request-rate", "3"], "finds the rate itself"),
    ],
)
def test_bad_flags_are_bad_usage(capsys, flags, message):
    assert cli.main(["bench", "simulate", *flags]) == 2
    assert message in capsys.readouterr().err
