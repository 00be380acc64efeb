"""Silent corruption: a replica gets a flipped bit in a real job (docs/corruption.md)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elasticrun.testing.job import ElasticJob
from tests.further import further
from tests.snapshots.conftest import Training, told

pytestmark = pytest.mark.slow

FLIPS = Path(__file__).with_name("flips.py")

EQUAL = r"the replicas on ranks 0-{} are equal at step \d+"

WAIT = 120.0
"""Seconds for two comparisons, which are ten seconds apart, on a machine that is busy."""


def begin(training: Training, ranks: int, *words: str, **more: object) -> ElasticJob:
    """A job whose replicas have been compared once, and are equal."""
    job = training.start(*words, script=FLIPS, nproc=ranks, **more)
    heard(training, EQUAL.format(training.world - 1))
    return job


def heard(training: Training, pattern: str) -> str:
    """What the nodes have printed, once the pattern is among it: on the node of the master."""
    training.until(lambda: training.said(pattern), pattern, WAIT)
    return "".join(training.job.output(node) for node in range(len(training.job.nodes)))


def flip(training: Training, rank: int) -> None:
    (training.out / f"flip-{rank}").touch()


def end(training: Training) -> None:
    (training.out / "stop").touch()
    training.finish()


def test_a_majority_names_the_rank(training: Training) -> None:
    """And what it has saved is not restored: after a failure it has what the others have."""
    job = begin(training, 3, max_restarts=1)
    flip(training, 1)
    heard(
        training,
        r"rank 1 \(node \S+\) differs from ranks 0,2 at step \d+, first in model.second.weight",
    )
    job.kill_rank(0)
    job.wait_for(round=2, phase="running")
    end(training)
    for rank in range(3):
        first, second = told(training.out, rank)
        assert (first["start"], first["equal"]) == (0, True)
        assert second["start"] > 0
        assert second["equal"], "the rank with the flipped bit has restored it"
    assert training.said("what it saved since then is not restored")


@further("core/scripts/corruption_of_one_of_two.txt", "test_a_majority_names_the_rank")
@pytest.mark.parametrize(
    ("flipped", "sides"),
    [((1,), "rank 0 and rank 1"), ((1, 3), "ranks 0,2 and ranks 1,3")],
    ids=["one of two", "two of four"],
)
def test_without_a_majority_both_sides_are_named(
    training: Training, flipped: tuple[int, ...], sides: str
) -> None:
    begin(training, 2 * len(flipped))
    for rank in flipped:
        flip(training, rank)
    text = heard(training, r"no majority shows which is right")
    assert re.search(rf"{sides} \(.*\) differ at step \d+, first in model.second.weight", text)
    end(training)
    assert len(re.findall("no majority", training.job.output(0))) == 1


@further("core/scripts/corruption_by_design.txt", "test_a_majority_names_the_rank")
def test_what_differs_from_the_start_is_by_design(training: Training) -> None:
    """A parameter that each rank has for itself is said once; statistics of a BatchNorm, which are
    buffers, are not even that."""
    begin(training, 3, "--mode", "adapter")
    flip(training, 2)
    text = heard(
        training, r"rank 2 \(.*\) differs from ranks 0-1 at step \d+, first in model.second"
    )
    end(training)
    said = re.findall(r"differ from the start in (.*?): this counts as intended", text)
    assert said == ["1 tensor (model.adapter)"]


@further("core/scripts/corruption_of_a_shard.txt", "test_a_majority_names_the_rank")
def test_replicas_of_a_shard(training: Training) -> None:
    """HSDP: each shard is on two ranks, and only these two are compared with each other."""
    begin(training, 4, "--mode", "hsdp")
    flip(training, 1)
    heard(training, r"rank 1 and rank 3 \(.*\) differ at step \d+, first in model.second.weight")
    end(training)


@further("test_a_majority_names_the_rank", "core/scripts/corruption_restart_then_exclude.txt")
def test_training_returns_and_then_the_node_is_excluded(training: Training) -> None:
    """--on-corruption=restart, on three nodes."""
    job = begin(
        *(training, 1),
        nodes=3,
        nnodes="2:3",
        together=True,
        options=["--on-corruption=restart", "--exclude-for=600"],
    )
    flip(training, 1)
    text = heard(training, r"round 1 is over: rank 1 .* differs from ranks 0,2")
    (agreed,) = re.findall(r"all were equal at step (\d+); training returns", text)
    job.wait_for(round=2, phase="running", world_size=3)
    training.until(lambda: all(len(told(training.out, rank)) == 2 for rank in range(3)), "start")
    assert [told(training.out, rank)[1]["start"] for rank in range(3)] == [int(agreed)] * 3
    assert all(told(training.out, rank)[1]["equal"] for rank in range(3))
    flip(training, 1)
    heard(training, r"node \S+ is excluded for \d+ s: rank 1 .* differs from ranks 0,2")
    job.wait_for(round=3, phase="running", world_size=2)
    training.until(lambda: len(told(training.out, 0)) == 3, "start")
    (training.out / "stop").touch()
    job.result()
    assert told(training.out, 0)[-1]["world"] == 2
    assert told(training.out, 0)[-1]["equal"]


@further(
    "core/scripts/corruption_over_a_master_death.txt",
    "test_a_majority_names_the_rank",
)
def test_a_new_master_knows_to_which_step_training_returns(training: Training) -> None:
    """The nodes tell it. The first step that it compares itself differs already."""
    job = begin(training, 3, options=["--on-corruption=restart"])
    flip(training, 1)
    job.kill_master()
    text = heard(training, r"round 1 is over: rank 1 .* differs from ranks 0,2")
    (agreed,) = re.findall(r"all were equal at step (\d+); training returns", text)
    job.wait_for(round=2, phase="running")
    training.until(lambda: all(len(told(training.out, rank)) == 2 for rank in range(3)), "start")
    assert [told(training.out, rank)[1]["start"] for rank in range(3)] == [int(agreed)] * 3
    end(training)


@further("core/scripts/loss_is_not_finite.txt")
def test_a_loss_that_is_not_finite(training: Training) -> None:
    """The ranks that had it first are in the report of the failure that follows."""
    job = training.start(script=FLIPS, nproc=2, max_restarts=1)
    job.wait_for_world(2, step=2)
    (training.out / "nan-1").touch()
    heard(training, r"the loss is nan since step \d+, first on rank 1")
    job.kill_rank(0)
    job.wait_for(round=2, phase="running")
    end(training)
    (folder,) = job.run_folders
    (report,) = folder.rglob("0001.md")
    assert re.search(r"Found before it\*\*: the loss is nan since step \d+", report.read_text())
