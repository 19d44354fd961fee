"""Deadline-aware admission: what cannot be answered in time is refused at once, with a time to come back."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from jserve.config import Config, ConfigError
from jserve.config_ranges import check_ranges
from jserve.engine.async_engine import AsyncEngine
from jserve.engine.settings import policy_settings
from jserve.request import Code, GenerateRequest, RequestError
from tests.support.host_engine import HostEngine, sampling, sequence


def engine_after_work(seconds_a_step: float, num_waiting: int) -> HostEngine:
    """Has measured its speed (16 tokens in that time) and has a queue of 32 tokens a request."""
    engine = HostEngine(num_blocks=999, budget=16, max_num_seqs=2)
    engine.runner._step_seconds = lambda plan: seconds_a_step
    engine.run([sequence(str(n), [n + 1] * 32, 3) for n in range(4)])
    engine.add(*(sequence(f"w{n}", [n + 1] * 32, 3) for n in range(num_waiting)))
    return engine


def admit(host: HostEngine, deadline_s: float | None, min_tokens: int = 0, **scheduler) -> None:
    section = {"deadline_admission": True, **scheduler}
    front = SimpleNamespace(config=Config().replace("scheduler", **section), _scheduler=host.scheduler)
    deadline = None if deadline_s is None else time.monotonic() + deadline_s
    request = GenerateRequest(prompt_token_ids=[1] * 32, deadline=deadline)
    AsyncEngine._refuse_when_too_late(front, request, sampling(50, min_tokens=min_tokens), 32)


def test_a_deadline_before_the_queue_ends_is_refused_with_a_time_to_come_back():
    host = engine_after_work(0.1, num_waiting=50)  # 50 x 32 tokens at about 160 a second: 10 s
    with pytest.raises(RequestError, match="the queue is too long") as refusal:
        admit(host, deadline_s=5.0)
    assert refusal.value.code is Code.RESOURCE_EXHAUSTED and 2 < refusal.value.retry_after_s < 15
    admit(host, deadline_s=60.0)
    admit(host, deadline_s=None)
    admit(host, deadline_s=5.0, deadline_admission=False)


def test_tokens_that_must_come_count_too():
    host = engine_after_work(0.1, num_waiting=0)
    admit(host, deadline_s=2.0)
    with pytest.raises(RequestError):
        admit(host, deadline_s=2.0, min_tokens=50)


def test_an_engine_that_has_run_nothing_refuses_nobody():
    admit(HostEngine(), deadline_s=0.001)


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"policy": "best"}, "one of fcfs, priority"),
        ({"tenant_weights": "a=b"}, "expected tenant=weight"),
        ({"target_tbt_ms": 0.0}, "must be above 0"),
        ({"ageing_s": -1.0}, "must be above 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused_by_name(setting, message):
    (key,) = setting
    config = Config().replace("scheduler", **setting)
    with pytest.raises(ConfigError, match=f"scheduler.{key} = .*{message}"):
        check_ranges(config)
        policy_settings(config)
