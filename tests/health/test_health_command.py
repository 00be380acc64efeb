"""--health-cmd on real jobs: a node that turns bad while it trains, one that is bad at the start,
and the only node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.counting import times
from tests.further import further
from tests.harness import await_exit, await_true, processes_of
from tests.health.conftest import EXCLUDED, Health

pytestmark = pytest.mark.slow


def command(mark: Path, pids: Path) -> str:
    """Unhealthy once `mark` exists. The runs write their pids, and leave a process behind."""
    bad = f"test ! -e {mark} || {{ echo GPU 3 fell off the bus; exit 1; }}"
    return f"--health-cmd=echo $$ >> {pids}; setsid sleep 1000 & echo $! >> {pids}; {bad}"


def test_a_node_turns_bad_while_it_trains(health: Health, tmp_path: Path) -> None:
    """It is excluded with its reason, the other trains on, and no restart is charged."""
    mark, pids = tmp_path / "mark", tmp_path / "pids"
    job = health.start("1:2", "--grow=now", nodes=1)
    job.add_node(options=[command(mark, pids), "--health-cmd-interval=0.2"])
    both = health.world_of(0, 1)
    await_true(lambda: len(pids.read_text().split()) >= 6, "three runs")
    health.goes_on(both)
    mark.touch()
    said = health.excluded(1)
    assert "its health command reports: GPU 3 fell off the bus (exit code 1)" in said
    alone = health.world_of(0, since=both.began)
    assert alone.restarts == 0
    listed = health.listed()
    assert (listed.node, listed.kind) == ("node1", "unhealthy")
    assert "GPU 3 fell off the bus" in health.shown()
    health.goes_on(alone)
    (folder,) = job.run_folders

    def written() -> list[dict[str, str]]:
        incidents = [json.loads(one.read_text()) for one in (folder / "incidents").glob("*.json")]
        return [one for one in incidents if one["node"] == "node1"]

    await_true(written, "incident of node 1")
    (found,) = written()
    assert found["cause"] == "node_lost"
    assert "GPU 3 fell off the bus" in found["sentence"]
    health.finish(0, EXCLUDED)
    left = [int(word) for word in pids.read_text().split()]
    assert not await_exit(left), processes_of(left)


@further("test_a_node_turns_bad_while_it_trains", "core/scripts/unhealthy_below_min.txt")
def test_a_node_that_is_bad_at_the_start_trains_nothing(health: Health, tmp_path: Path) -> None:
    job = health.start("1:2", "--grow=now", nodes=1)
    world = health.world_of(0)
    job.add_node(options=["--health-cmd=echo no driver; exit 1"])
    node = job.nodes[1]
    assert not await_exit([node.pid])
    assert node.exit_code == EXCLUDED
    said = health.said(1)
    assert "this node is unhealthy: its health command reports: no driver (exit code 1)" in said
    health.goes_on(world)
    health.finish(0, EXCLUDED)


@further("core/scripts/unhealthy_only_node.txt", "test_a_node_turns_bad_while_it_trains")
def test_the_only_node_ends_the_job_and_says_why(health: Health, tmp_path: Path) -> None:
    mark, pids = tmp_path / "mark", tmp_path / "pids"
    words = (command(mark, pids), "--health-cmd-interval=0.2", times(master_lost_timeout=60))
    health.start("1", *words)
    health.world_of(0)
    mark.touch()
    assert "GPU 3 fell off the bus" in health.excluded(0)
    left = [int(word) for word in pids.read_text().split()]
    assert not await_exit(left), processes_of(left)


@further(
    "test_a_node_turns_bad_while_it_trains",
    "faults/test_in_a_row::test_one_job_of_three_bears_one_harm_after_another",
)
def test_the_node_of_the_master_turns_bad(health: Health, tmp_path: Path) -> None:
    """Its agent started the master; the other node trains on with the next one."""
    mark, pids = tmp_path / "mark", tmp_path / "pids"
    job = health.start("1:2", command(mark, pids), "--health-cmd-interval=0.2", nodes=1)
    job.add_node(options=["--health-cmd="])
    both = health.world_of(0, 1)
    mark.touch()
    assert "GPU 3 fell off the bus" in health.excluded(0)
    alone = health.world_of(1, since=both.began)
    assert alone.restarts == 0
    health.goes_on(alone)
    health.finish(EXCLUDED, 0)
