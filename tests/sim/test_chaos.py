"""Worlds drawn from seeds: whatever befalls them, the invariants of `sim.chaos` hold."""

from __future__ import annotations

import pytest

from elasticrun.core import crew, rendezvous
from elasticrun.sim.chaos import Chaos, Findings
from elasticrun.sim.script import read, run

SEEDS = 320
BATCH = 40


def in_words(findings: Findings) -> str:
    tail = "\n".join(findings.lines[-60:])
    return f"seed {findings.seed}: {findings.faults[:5]}\n{tail}"


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_invariants_hold(first: int) -> None:
    events = rounds = 0
    for seed in range(first, first + BATCH):
        findings = Chaos(seed).run()
        assert not findings.faults, in_words(findings)
        events += findings.events
        rounds += findings.rounds
    assert events > BATCH * 100, "the worlds must be busy"
    assert rounds > BATCH * 2


def test_a_seed_is_one_world() -> None:
    assert Chaos(7).run() == Chaos(7).run()


def test_the_invariant_of_one_world_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the fence a partitioned node trains beside its successor, and the world says so."""
    monkeypatch.setattr(rendezvous, "FENCE_SLACK", -1e6)
    script = read("# why\njob 1:2\nworld beats=1\n0 node a\n5 cut a\n6 node b\n60 end\n")
    assert any("step at once" in fault for fault in run(script).worlds.faults)


def test_the_invariant_of_rest_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that never ends is found."""
    monkeypatch.setattr(crew, "REATTACH_GRACE", 1e6)
    assert any("at rest" in fault for seed in range(40) for fault in Chaos(seed).run().faults)
