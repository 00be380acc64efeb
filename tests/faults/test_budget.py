"""What restarts cost, how long they wait, and whom they are charged to."""

from __future__ import annotations

import signal

import pytest

from tests.faults.steps import Life
from tests.faults.team import Team, let_pass
from tests.harness import World

pytestmark = pytest.mark.slow


def pauses(lives: list[Life]) -> list[float]:
    """Seconds between the last step of each world and the first of the next."""
    ends = [max(step.done for step in life.steps) for life in lives]
    return [after.first - end for end, after in zip(ends, lives[1:], strict=False)]


def test_a_rank_that_dies_at_once_again_and_again(world: World) -> None:
    """The first restart is immediate; then it waits 1, 2 and 4 s. The budget is the job's: four
    restarts in all, whichever of the two nodes the failing rank is on."""
    team = Team(world, "2", "--max-restarts=4", env={"STEPS_FAIL_ON": "0"})
    team.add()
    team.add()
    assert [node.agent.wait(120) for node in team.nodes] == [1, 1]
    lives = team.log.lives()
    assert [life.restart for life in lives] == [0, 1, 2, 3, 4]
    waits = pauses(lives)
    assert waits[1] >= 1.0
    assert waits[2] >= 2.0
    assert waits[3] >= 4.0
    assert waits[0] < waits[3]
    team.nodes[1].agent.until_text("the next restart waits 4 s")
    assert "the next restart waits 8 s" not in team.words()


def test_no_back_off_where_none_is_wanted(world: World) -> None:
    """`--restart-backoff=0`, as torchrun restarts."""
    team = Team(world, "1", "--max-restarts=4", "--restart-backoff=0", env={"STEPS_FAIL_ON": "0"})
    team.add()
    assert team.nodes[0].agent.wait(120) == 1
    assert [life.restart for life in team.log.lives()] == [0, 1, 2, 3, 4]
    assert "the next restart waits" not in team.words()


def test_a_budget_that_is_a_rate(world: World) -> None:
    """`--restart-window=3 --max-restarts=1`: three failures, each more than 3 s after the one
    before, are borne; two within 3 s end the job."""
    team = Team(world, "1", "--max-restarts=1", "--restart-window=3", "--restart-backoff=0")
    life = team.start(1)
    for count in range(1, 4):
        if count > 1:
            let_pass(3.2)  # longer than the window
        team.rank(life, 0).order("die", signum=int(signal.SIGSEGV))
        life = team.log.world_of(1, after=life)
        assert life.restart == count
    team.rank(life, 0).order("die", signum=int(signal.SIGSEGV))
    assert team.nodes[0].agent.wait() == 1
    assert len(team.check()) == 4


def test_membership_costs_no_restart(world: World) -> None:
    """A loss and a return between two failures: two restarts are charged, not four. A budget of
    two is spent then, and the third failure ends the job."""
    team = Team(world, "1:2", "--max-restarts=2", "--grow=now", "--restart-backoff=0")
    life = team.start(2)
    team.rank(life, 0).order("die")
    life = team.log.world_of(2, after=life)
    assert life.restart == 1
    team.nodes[1].kill()
    life = team.log.world_of(1, after=life)
    assert life.restart == 1
    back = team.add(name="n1")
    life = team.log.world_of(2, after=life)
    assert life.restart == 1
    team.rank(life, 1).order("die")
    life = team.log.world_of(2, after=life)
    assert life.restart == 2
    team.rank(life, 0).order("die")
    assert [team.nodes[0].agent.wait(), back.agent.wait()] == [1, 1]
    assert [life.restart for life in team.check()] == [0, 1, 1, 1, 2]


def test_a_node_whose_ranks_keep_dying_is_left_out(world: World) -> None:
    """The same script works on the others: so it is the node, and the job goes on without it and
    says so."""
    team = Team(
        world,
        "2:3",
        *("--max-restarts=10", "--restart-backoff=0"),
        env={"STEPS_FAIL_ON": "n1"},
    )
    for _ in range(3):
        team.add()
    without = team.log.until(
        lambda: next(
            (
                life
                for life in team.log.lives()
                if "n1" not in life.nodes.values() and len(life.whole_steps()) > 5
            ),
            None,
        ),
        "world without the bad node",
    )
    assert without.size == 2
    assert without.restart <= 4
    out = next(node for node in team.nodes if node.name == "n1")
    said = out.agent.until_text("left out")
    assert "n1" in said
    team.finish()


def test_a_script_that_keeps_dying_excludes_nobody(world: World) -> None:
    """It fails on every node: the job ends when the budget is spent, with all of them."""
    team = Team(
        world,
        "2:3",
        *("--max-restarts=4", "--restart-backoff=0"),
        env={"STEPS_FAIL_ON": "0,1,2"},
    )
    for _ in range(3):
        team.add()
    assert [node.agent.wait(120) for node in team.nodes] == [1, 1, 1]
    lives = team.log.lives()
    assert lives[-1].restart == 4
    assert {life.size for life in lives[1:]} == {3}
    assert "left out" not in team.words()


def test_a_rank_that_dies_wherever_it_runs(world: World) -> None:
    """Rank 0 fails on the first node, and on the next one that gets that rank: so it is the script,
    and the job ends when the budget is spent. No further node is blamed."""
    team = Team(world, "2:3", "--max-restarts=6", "--restart-backoff=0", env={"STEPS_FAIL_ON": "0"})
    for _ in range(3):
        team.add()
    assert {node.agent.wait(120) for node in team.nodes} == {1}
    lives = team.log.lives()
    assert lives[-1].restart == 6
    assert len({life.nodes[0] for life in lives}) <= 2
    assert team.words().count("left out: its ranks") <= 2 * 3
