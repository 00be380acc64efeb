"""Worlds drawn from seeds: whatever befalls them, the invariants of `sim.chaos` hold."""

from __future__ import annotations

from functools import cache

import pytest

from elasticrun.core.rounds import rendezvous, takeover
from tests.further import cases, fresh_seeds, further
from tests.simulator.chaos import Chaos, Findings
from tests.simulator.script import read, run

pytestmark = pytest.mark.slow

SEEDS = 240
CHECKED_SEEDS = 80
FRESH_SEEDS = 1500
BATCH = 10
CHECKED = 5
"""Worlds of one test: without and with the network check."""


@cache
def world(seed: int) -> Findings:
    """What became of a world: several tests look at the same ones."""
    return Chaos(seed).run()


def in_words(findings: Findings) -> str:
    tail = "\n".join(findings.lines[-60:])
    return f"seed {findings.seed}: {findings.faults[:5]}\n{tail}"


@pytest.mark.parametrize("first", cases(range(0, SEEDS, BATCH), kept=[0]))
def test_invariants_hold(first: int) -> None:
    events = rounds = 0
    for seed in range(first, first + BATCH):
        findings = world(seed)
        assert not findings.faults, in_words(findings)
        events += findings.events
        rounds += findings.rounds
    assert events > BATCH * 100, "the worlds must be busy"
    assert rounds > BATCH * 2


@pytest.mark.parametrize("first", cases(range(0, CHECKED_SEEDS, CHECKED), kept=[0]))
def test_invariants_hold_with_the_network_check(first: int) -> None:
    excluded = rounds = 0
    for seed in range(first, first + CHECKED):
        findings = Chaos(seed, checks=True).run()
        assert not findings.faults, in_words(findings)
        rounds += findings.rounds
        excluded += sum("is excluded for" in line for line in findings.lines)
    assert rounds > CHECKED
    assert excluded > CHECKED // 4, "many machines must turn bad"


@further("test_invariants_hold_with_the_network_check")
@pytest.mark.parametrize("first", fresh_seeds(FRESH_SEEDS // 3, 125))
def test_invariants_hold_with_the_network_check_for_fresh_seeds(first: int) -> None:
    for seed in range(first, first + 125):
        findings = Chaos(seed, duration=120.0, checks=True).run()
        assert not findings.faults, in_words(findings)


@further("test_invariants_hold")
@pytest.mark.parametrize("first", fresh_seeds(FRESH_SEEDS, 250))
def test_invariants_hold_for_fresh_seeds(first: int) -> None:
    for seed in range(first, first + 250):
        findings = Chaos(seed, duration=120.0).run()
        assert not findings.faults, in_words(findings)


def test_masters_die_in_the_middle_of_what_they_do() -> None:
    """The worlds above are not tame: most masters die at an act, and most are succeeded by one with
    a record."""
    lines = [line for seed in range(BATCH) for line in world(seed).lines]
    assert sum("the master dies" in line for line in lines) > 5
    assert sum("the record says" in line for line in lines) > 5
    assert sum(", which is already running" in line for line in lines) > 1


def test_a_seed_is_one_world() -> None:
    assert Chaos(7).run() == Chaos(7).run()


def test_the_invariant_of_one_world_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the fence a partitioned node trains beside its successor, and the world says so."""
    monkeypatch.setattr(rendezvous, "FENCE_SLACK", -1e6)
    script = read("# why\njob 1:2\nworld beats=1\n0 node a\n5 cut a\n6 node b\n60 end\n")
    assert any("step at once" in fault for fault in run(script).worlds.faults)


def test_the_invariant_of_rest_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that never ends is found, in one world of many: in that of 22 today."""
    monkeypatch.setattr(takeover, "REATTACH_GRACE", 1e6)
    seeds = (22, *range(40))
    assert any("at rest" in fault for seed in seeds for fault in Chaos(seed).run().faults)
