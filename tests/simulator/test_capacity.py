"""Capacity under targets: what is compared, the table, the picture."""

from __future__ import annotations

import xml.dom.minidom

import numpy as np

from jserve.simulator import capacity
from jserve.simulator.capacity import Capacity
from jserve.simulator.steps import one_second
from jserve.simulator.workload import Lengths

RATES = {("jserve", 0.025): 6.0, ("jserve", 0.05): 12.0, ("jserve", 0.1): 9.0, ("jserve", 0.2): 15.0,
         ("static", 0.025): 0.0, ("static", 0.05): 3.0, ("static", 0.1): 2.0, ("static", 0.2): 6.1,
         ("other", 0.025): 1.0, ("other", 0.05): 2.0, ("other", 0.1): 4.0, ("other", 0.2): 6.0}


def found(monkeypatch) -> list[Capacity]:
    asked = []

    def scripted(name, make, lengths, step_seconds, target_s, **search):
        asked.append((name, make()))
        return Capacity(name, target_s, RATES[name, target_s], [])

    monkeypatch.setattr(capacity, "find_capacity", scripted)
    makers = {name: (lambda name=name: name) for name in ("jserve", "static", "other")}
    adapted = {"jserve": lambda target: f"jserve for {target:g}"}
    lengths = Lengths(np.array([1]), np.array([1]))
    answer = capacity.compare(makers, adapted, lengths, one_second, [0.2, 0.025, 0.05, 0.1])
    assert asked[:2] == [("jserve", "jserve for 0.025"), ("jserve", "jserve for 0.05")], "made anew for each target"
    return answer


def test_what_keeps_a_tighter_target_keeps_a_looser_one(monkeypatch):
    rates = {(one.system, one.target_s): one.rate for one in found(monkeypatch)}
    assert [rates["jserve", target] for target in (0.025, 0.05, 0.1, 0.2)] == [6, 12, 12, 15]
    assert [rates["static", target] for target in (0.025, 0.05, 0.1)] == [0, 3, 2], "a baseline has one setting"


def test_the_table_has_ratios_and_the_picture_a_line_a_system(monkeypatch):
    answer = found(monkeypatch)
    text = capacity.table(answer)
    assert "jserve over static" in text and "4.0x" in text and "6.0x" in text and "-" in text
    drawing = xml.dom.minidom.parseString(capacity.plot_svg(answer))
    assert len(drawing.getElementsByTagName("polyline")) == 3
    names = [node for node in drawing.getElementsByTagName("text") if node.firstChild.data in ("static", "other")]
    heights = [float(node.getAttribute("y")) for node in names]
    assert abs(heights[0] - heights[1]) >= 13, "names do not cover each other"
    assert capacity.plot_html(answer, "<t>").count("<svg") == 1
