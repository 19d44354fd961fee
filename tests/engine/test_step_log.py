"""The step log: whatever happened, a replay makes the same decisions, finds a changed one, and the log tells no text."""

from __future__ import annotations

import json
import re
import threading

import numpy as np
import pytest

from jserve.cli import main as cli
from jserve.engine.loop import EngineLoop
from jserve.engine.replay import replay
from jserve.engine.step_log import KvSettings, StepLog
from jserve.request import FinishReason
from jserve.runner.fake_runner import FakeRunner
from jserve.scheduler import POLICIES, PolicySettings, PreemptionSettings, Scheduler, SchedulerLimits
from jserve.scheduler.buckets import powers_up_to
from tests.support.host_engine import beams, expected_output, group, sequence
from tests.support.jumping_runner import JumpingRunner


class Logged:
    """An engine loop with a log, over the stand-in runner; its thread runs until every sequence has ended."""

    def __init__(
        self, path, *, num_blocks=40, budget=16, max_num_seqs=6, overlap=True, runner=None, num_host_blocks=None,
        host_tier=False, **scheduler,
    ):
        slots = min(budget, max_num_seqs)
        self.kv = KvSettings((None,), (num_blocks,), 4, slots, num_blocks, True, num_host_blocks, host_tier)
        limits = SchedulerLimits(budget, max_num_seqs, powers_up_to(4, budget), powers_up_to(1, slots), 8)
        self.scheduler = Scheduler(limits, self.kv.make(), **scheduler)
        self.path = path
        self.log = StepLog(path, self.scheduler, self.kv)
        self.idle = threading.Event()
        self.num_results = 0
        self.on_result = lambda result: None
        self.loop = EngineLoop(
            self.scheduler, runner or FakeRunner(slots), self._hear, overlap=overlap, step_log=self.log
        )

    def _hear(self, result) -> None:
        self.num_results += 1
        self.on_result(result)

    def run(self, *groups) -> None:
        sequences = [one for group in groups for one in group]
        self.loop.on_step = lambda scheduler: self.idle.set() if all(s.finished for s in sequences) else None
        for one in groups:
            if one[0].group is None and len({s.request_id for s in one}) == 1:
                self.loop.submit(one)
            else:
                for alone in one:
                    self.loop.submit([alone])
        self.loop.start()
        assert self.idle.wait(60)
        self.loop.stop()

    def records(self) -> list[dict]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]


def groups(count: int, seed: int = 0) -> list[list]:
    """Requests of several samples or beams."""
    random = np.random.default_rng(seed)
    made = []
    for number in range(count):
        prompt = random.integers(1, 900, int(random.integers(1, 25))).tolist()
        if number % 2:
            made.append(group(str(number), prompt, int(random.integers(10, 30)), int(random.integers(2, 5))))
        else:
            stops = frozenset(range(0, 1000, 9))
            made.append(beams(str(number), prompt, int(random.integers(1, 15)), int(random.integers(2, 5)), stop_token_ids=stops))
    return made


def work(count: int, seed: int = 0, **changes) -> list:
    random = np.random.default_rng(seed)
    shared = random.integers(1, 900, 24).tolist()
    made = []
    for number in range(count):
        prompt = shared[: int(random.integers(0, 24))] + random.integers(1, 900, int(random.integers(1, 20))).tolist()
        priority = int(random.integers(-1, 2))
        made.append(sequence(str(number), prompt, int(random.integers(1, 12)), priority=priority, **changes))
    return made


@pytest.mark.parametrize("kind", ["recompute", "swap"])
@pytest.mark.parametrize("num_host_blocks", [None, (12,)])
def test_a_replay_makes_the_same_decisions_about_samples_and_beams(tmp_path, kind, num_host_blocks):
    engine = Logged(
        tmp_path / "steps.log", num_blocks=22, num_host_blocks=num_host_blocks, preemption=PreemptionSettings(kind)
    )
    requests = groups(30) + [[one] for one in work(20)]
    engine.run(*requests)
    again = replay(engine.path)
    assert again.difference is None
    assert again.num_preemptions == engine.scheduler.num_preemptions > 0
    if kind == "swap" and num_host_blocks:
        assert engine.scheduler.num_swap_preemptions > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_what_comes_back_from_host_memory_comes_back_in_a_replay(tmp_path, overlap):
    engine = Logged(tmp_path / "steps.log", overlap=overlap, num_blocks=14, num_host_blocks=(40,), host_tier=True)
    engine.run(work(60), *groups(4))
    assert engine.scheduler.blocks.tier_stats.num_host_hit_tokens > 0
    assert replay(engine.path).difference is None


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_blocks", [14, 40])
def test_a_replay_makes_the_same_decisions(tmp_path, capsys, overlap, num_blocks):
    engine = Logged(tmp_path / "steps.log", overlap=overlap, num_blocks=num_blocks)
    engine.run(work(60))
    again = replay(engine.path)
    assert again.difference is None
    assert (again.num_requests, again.num_preemptions) == (60, engine.scheduler.num_preemptions)
    assert (num_blocks == 14) == (again.num_preemptions > 0)
    assert cli.main(["replay", str(engine.path)]) == 0
    assert "the same decisions" in capsys.readouterr().out


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_blocks", [14, 60])
def test_jumps_over_forced_tokens_are_replayed(tmp_path, overlap, num_blocks):
    runner = JumpingRunner(6)
    engine = Logged(tmp_path / "steps.log", overlap=overlap, num_blocks=num_blocks, runner=runner)
    ends = frozenset(range(0, 1000, 30))
    engine.run(work(40, eos_token_ids=ends), *[[one] for one in work(20, seed=5)])
    assert runner.num_forced > 30 and (num_blocks == 14) == (engine.scheduler.num_preemptions > 0)
    assert replay(engine.path).difference is None


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_and_the_latency_target_are_replayed(tmp_path, policy):
    random = np.random.default_rng(0)
    runner = FakeRunner(6, step_seconds=lambda plan: 1e-3 * (1 + plan.num_tokens * random.random()))
    settings = PolicySettings(policy, 0.05, {"tenant-crimson": 2.0}, target_tbt_s=0.008)
    engine = Logged(tmp_path / "steps.log", num_blocks=16, runner=runner, policy=settings)
    sequences = work(50)
    for number, one in enumerate(sequences):
        one.arrival, one.tenant = 0.01 * number, ("tenant-crimson", "tenant-azure")[number % 2]
    engine.run(sequences)
    assert replay(engine.path).difference is None
    assert "crimson" not in engine.path.read_text()


def test_prefix_hits_also_those_of_generated_tokens_are_made_again(tmp_path):
    engine = Logged(tmp_path / "steps.log", max_num_seqs=1)
    prompt = [5, 9, 2, 7, 1, 3]
    turn = prompt + expected_output(prompt, 11) + [4, 4]
    second = sequence("b", turn, 5)
    engine.run([sequence("a", prompt, 11)], [second], [sequence("c", prompt, 3)])
    assert second.num_cached == 16, "four blocks, most of them of generated tokens"
    assert replay(engine.path).difference is None


def test_stops_aborts_and_a_flush_are_part_of_the_log(tmp_path):
    engine = Logged(tmp_path / "steps.log")
    prompts = [[number + 1, 7, 3, 8, 2, 6] for number in range(8)]
    stopped = [
        sequence(f"s{n}", p, 40, stop_token_ids=frozenset([expected_output(p, 5)[-1]])) for n, p in enumerate(prompts)
    ]
    endless = [sequence(f"e{n}", p, 400) for n, p in enumerate(prompts[:3])]
    cut = sequence("cut", [1, 2, 3], 400)
    state = {"aborted": False}

    def on_result(result) -> None:
        if all(one.finished for one in stopped) and not state["aborted"]:
            state["aborted"] = True
            engine.loop.call(engine.scheduler.blocks.flush)
            for one in endless:
                engine.loop.abort(one.request_id)
            engine.loop.finish(cut, FinishReason.STOP)

    engine.on_result = on_result
    engine.run(stopped, endless, [cut])
    kinds = {key for record in engine.records() for key in record}
    assert {"a", "e", "p", "r", "f", "stop"} <= kinds
    assert {one.finish_reason for one in endless} == {FinishReason.ABORTED}
    assert replay(engine.path).difference is None


def test_a_step_that_broke_is_replayed_as_such(tmp_path):
    class Broken(FakeRunner):
        num_launched = 0

        def launch(self, plan):
            self.num_launched += 1
            if self.num_launched == 9:
                raise RuntimeError("planted")
            super().launch(plan)

        def reset(self):
            self._done.clear()

    engine = Logged(tmp_path / "steps.log", runner=Broken(6))
    engine.run(work(30))
    assert any("x" in record for record in engine.records())
    assert replay(engine.path).difference is None


def test_the_first_changed_decision_is_shown(tmp_path, capsys):
    engine = Logged(tmp_path / "steps.log")
    engine.run(work(20))
    lines = engine.path.read_text().splitlines()
    at = [place for place, line in enumerate(lines) if line.startswith('{"p":{')][5]
    record = json.loads(lines[at])
    record["p"]["bucket"] += 1
    lines[at] = json.dumps(record)
    engine.path.write_text("\n".join(lines) + "\n")
    assert cli.main(["replay", str(engine.path)]) == 1
    text = capsys.readouterr().out
    step, bucket = record["p"]["step"], record["p"]["bucket"]
    assert f"step {step} (line {at + 1}) differs" in text
    assert f"bucket: recorded {bucket}, now {bucket - 1}" in text


def test_another_budget_is_found_at_the_first_step_that_it_changes(tmp_path):
    engine = Logged(tmp_path / "steps.log", budget=16)
    engine.run(work(20))
    lines = engine.path.read_text().splitlines()
    header = json.loads(lines[0])
    header["limits"]["max_num_batched_tokens"] = 8
    header["limits"]["token_buckets"] = [4, 8]
    engine.path.write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
    difference = replay(engine.path).difference
    assert difference.step == 1 and "chunks" in difference.keys


def test_the_log_holds_no_token_ids_and_equal_prompts_look_different_in_two_logs(tmp_path):
    texts = []
    for name in ("one", "two"):
        engine = Logged(tmp_path / name)
        engine.run([sequence("a", [777] * 40, 8), sequence("b", [777] * 40, 8)])
        texts.append([record["blocks"] for record in engine.records() if "a" in record])
    assert texts[0][0] == texts[0][1] and texts[0] != texts[1]
    assert not re.search(r"\b777\b", (tmp_path / "one").read_text())


def test_the_log_is_short(tmp_path):
    engine = Logged(tmp_path / "steps.log", num_blocks=900, budget=64, max_num_seqs=32)
    engine.run([sequence(str(n), [n + 1, 2, 3], 60) for n in range(32)])
    plans = [len(json.dumps(record)) for record in engine.records() if "p" in record]
    assert np.median(plans) < 120, "a step of decodes costs a line of this length, however many rows it has"


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "not a step log"),
        ("{}\n", "not a step log"),
        ("nonsense\n", "not a line of a step log"),
        ('{"jserve_step_log":1,"limits":{"speed":1},"kv":{}}\n', "another version"),
    ],
)
def test_what_is_no_log_is_one_line(tmp_path, capsys, text, message):
    path = tmp_path / "steps.log"
    path.write_text(text)
    assert cli.main(["replay", str(path)]) == 1
    assert message in capsys.readouterr().err


def test_a_log_cut_in_its_last_line_is_replayed_up_to_there(tmp_path):
    engine = Logged(tmp_path / "steps.log")
    engine.run(work(10))
    text = engine.path.read_text()
    engine.path.write_text(text[: int(len(text) * 0.7)])
    again = replay(engine.path)
    assert again.difference is None and again.num_steps > 3


def test_a_full_disk_ends_the_log_and_not_the_steps(caplog):
    """/dev/full takes what is buffered and refuses it when it is flushed."""
    logged = Logged("/dev/full")
    sequences = [sequence(f"r{number}", range(20), 40) for number in range(6)]
    logged.run(*[[one] for one in sequences])
    assert all(one.num_known - one.num_prompt == 40 for one in sequences)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "'/dev/full': No space left on device; nothing more is written to it" in caplog.text
