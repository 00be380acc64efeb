"""Snapshots in a world in which all goes wrong: what must hold stands in `simulator.memory`."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticrun.core.snapshots import checkpoints
from elasticrun.core.snapshots.checkpoints import Share, divide
from elasticrun.core.snapshots.choice import RestorePoints
from elasticrun.core.snapshots.ledger import Ledger
from elasticrun.core.snapshots.replication import Replicas
from elasticrun.core.worker.leaving import Draining
from elasticrun.wire.messages import RoundInfo, Start
from elasticrun.wire.types import Endpoint, RoundName
from tests.further import cases, fresh_seeds, further
from tests.simulator.script import read, run
from tests.simulator.training import TrainingChaos

pytestmark = pytest.mark.slow

SEEDS = 30
FRESH_SEEDS = 500
BATCH = 10
SCRIPTS = Path(__file__).parents[1] / "core" / "scripts"
ROUND = RoundName(1, 2, "other")


@pytest.mark.parametrize("first", cases(range(0, SEEDS, BATCH), kept=[0]))
def test_invariants_hold(first: int) -> None:
    checkpoints = restores = judged = 0
    for seed in range(first, first + BATCH):
        chaos = TrainingChaos(seed)
        findings = chaos.run()
        assert not findings.faults, (seed, findings.faults[:5], findings.lines[-40:])
        checkpoints += len(chaos.world.shelves.checkpoints)
        restores += sum(one is not None for one in chaos.world.shelves.restores.values())
        judged += chaos.world.shelves.judged
    assert judged, "a node was lost of a job with replicas"
    assert checkpoints > BATCH, "the worlds must be busy"
    assert restores > BATCH


@further("test_invariants_hold")
@pytest.mark.parametrize("first", fresh_seeds(FRESH_SEEDS, 100))
def test_invariants_hold_for_fresh_seeds(first: int) -> None:
    for seed in range(first, first + 100):
        findings = TrainingChaos(seed, duration=120.0).run()
        assert not findings.faults, (seed, findings.faults[:5], findings.lines[-40:])


REPLICAS = """# why
job 1:2
world state=sharded replicas=1
0 node a b
5 snap 100
7 kill b
12 end
"""
UNSAVED = """# why
job 1:2
world state=sharded
0 node a b
4 disk b full
5 snap 100
6 signal SIGTERM b
200 end
"""
PAIR = "# why\njob 2:2\nworld state=sharded\n0 node a b\n5 snap 100 {}\n9 end\n"


def half(ledger: Ledger, step: int) -> dict[str, Share]:
    return {"a": divide(ledger, step)["a"]}


@pytest.mark.parametrize(
    ("owner", "name", "wrong", "text", "fault"),
    [
        (Ledger, "is_whole", lambda *_: True, PAIR.format("a"), "never was whole"),
        (Draining, "has_saved", lambda *_: True, UNSAVED, "b ends as saved"),
        (Replicas, "counts", lambda *_: True, REPLICAS, "not on two nodes"),
        (checkpoints, "divide", half, PAIR.format("persist"), "lacks parts"),
    ],
)
def test_what_must_hold_can_fail(
    owner: object, name: str, wrong: object, text: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, wrong)
    assert any(fault in one for one in run(read(text)).worlds.faults)


def test_a_step_that_is_lost_with_one_node_is_found() -> None:
    shelves = run(read(REPLICAS)).shelves
    shelves.settle()
    assert (shelves.judged, shelves.faults) == (1, [])
    *_, last = shelves.restores
    shelves.restores[last] = None
    shelves.settle()
    assert any("were lost of" in fault for fault in shelves.faults)


def test_memory_that_a_blind_master_does_not_use_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (SCRIPTS / "snapshots_all_are_killed.txt").read_text()
    shelves = run(read(text)).shelves
    shelves.settle()
    assert (shelves.judged_blind, shelves.faults) == (1, [])
    monkeypatch.setattr(RestorePoints, "_note_earlier_round", lambda saves, last: None)
    shelves = run(read(text)).shelves
    shelves.settle()
    assert any("restores None, and [] were lost of" in fault for fault in shelves.faults)


def test_a_snapshot_dropped_while_it_is_written_is_found() -> None:
    """Ranks that go on from nothing while a step is written out: a master that does not end the
    attempt before it says so."""
    script = read("# why\njob 1:1\n0 node a\n5 snap 100 persist\n5.2 end\n")
    world = run(script)
    memory = world.nodes["a"].memory
    (kept,) = memory.kept
    assert kept.attempts
    memory.started(Start(RoundInfo(ROUND, 1, 0), 0, 1, 0, 0, 1, Endpoint("a", 1), host_store=True))
    assert any("which is being written" in fault for fault in world.shelves.faults)
