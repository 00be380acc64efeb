"""Nodes that are left out for a while."""

from __future__ import annotations

from elasticrun.core.nodes.admission import Bars


def test_each_waits_its_time_with_its_reason() -> None:
    bars = Bars()
    bars.put("b", 120.0, "it fell silent too often")
    bars.put("c", 60.0, "its ranks kept failing")
    assert (len(bars), "b" in bars, bars.next()) == (2, True, 60.0)
    assert bars.sentence("b", 20.4) == "left out: it fell silent too often; let in again in 100 s"
    assert bars.due(59.0) == []
    assert bars.due(60.0) == ["c"]
    assert "c" not in bars
    bars.lift("b")
    bars.lift("b")
    assert (list(bars), bars.next(), bars.due(1e9)) == ([], None, [])


def test_the_newest_word_counts() -> None:
    bars = Bars()
    bars.put("b", 120.0, "one")
    bars.put("b", 30.0, "another")
    assert bars.sentence("b", 0.0) == "left out: another; let in again in 30 s"
    assert bars.due(30.0) == ["b"]
