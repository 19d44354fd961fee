"""`bench host`: how the host's time of a step grows, in ratios, since machines differ."""

from __future__ import annotations

import json

from jserve.bench.host import HostLoad, measure
from jserve.cli import main as cli


def best(num_running: int, num_waiting: int) -> float:
    """Seconds of CPU of a good step: the lower decile of three runs, which other work on the machine hardly touches."""
    totals = [measure(HostLoad(num_running, num_waiting, num_steps=120)).totals for _ in range(3)]
    return min(sorted(one)[len(one) // 10] for one in totals)


def test_host_time_is_constant_in_waiting_and_at_most_linear_in_running():
    few, many_waiting, many_running = best(64, 100), best(64, 30_000), best(256, 100)
    assert many_waiting < 1.6 * few
    assert many_running < 1.3 * 4 * few


def test_the_report_names_every_phase(capsys):
    flags = ["--running", "8", "--waiting", "20", "--num-steps", "30"]
    assert cli.main(["bench", "host", *flags, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["mode"] == "host" and [point["churn"] for point in answer["points"]] == [False, True]
    for point in answer["points"]:
        phases = sum(point[f"median_{phase}_us"] for phase in ("schedule", "build", "apply"))
        assert 0 < phases < 3 * point["median_total_us"]
    assert cli.main(["bench", "host", *flags, "--profile"]) == 0
    shown = capsys.readouterr()
    assert "schedule" in shown.out and "tottime" in shown.err
