"""Replicas: a node that is lost with the only original of its part costs no step."""

from __future__ import annotations

import pytest

from elasticrun.testing.job import ElasticJob
from tests.snapshots.conftest import Training, ends, flip

pytestmark = pytest.mark.slow

ON_TWO = "step {} is whole in memory, on two nodes"


def begin(training: Training, mode: str = "fsdp2", **options: object) -> ElasticJob:
    """Two nodes of one rank, stopped at step 7, which is on both, as step 6 before it."""
    job = training.start("--replicas", "1", mode=mode, gated=True, nproc=1, **options)  # type: ignore[arg-type]
    training.world = 2  # a third node is a spare
    training.all_there()
    for step in (6, 7):  # at the gate: a step that another one follows at once need not be copied
        training.open_gate(step)
        job.wait_for_world(2, step=step)
        job.wait_for(lambda status, step=step: ON_TWO.format(step) in status.snapshot)
    return job


def test_a_spare_takes_over_what_the_lost_node_had(training: Training) -> None:
    """FSDP, a whole node with its memory: the others go on from memory, bit by bit the same."""
    # without a restart to spend, a job that is below its least number of nodes ends at once, and
    # the spare may be late
    job = begin(training, nodes=3, nnodes="2:2", together=True, max_restarts=1)
    assert len(training.segments(replicas=True)) == 2
    job.kill_node(job.wait_for_world(2).nodes[1])
    training.lose_memory()
    training.go_on()
    training.finish()
    assert training.starts(0) == training.starts(1) == [0, 7]
    assert training.said(r"go on from step 7 \(memory\)")
    assert not training.checkpoints()
    training.is_as_if_nothing_happened()


def test_the_rest_goes_on_alone(training: Training) -> None:
    """Fewer nodes: what was the lost one's is cut anew from its replica."""
    job = begin(training, nodes=2, nnodes="1:2")
    job.kill_node(job.wait_for_world(2).nodes[1])
    training.lose_memory()
    training.go_on()
    training.finish()
    assert training.starts(0) == [0, 7]
    assert len(ends(training.out, 0)) == 1
    assert not training.checkpoints()


def test_a_flipped_bit_in_a_replica(training: Training) -> None:
    """It does not have its hash, so the step before is taken, and it is said."""
    # without a restart to spend, a job that is below its least number of nodes ends at once
    job = begin(training, nodes=2, nnodes="2", max_restarts=3)
    victim = job.wait_for_world(2).nodes[1]
    job.kill_node(victim)
    training.lose_memory()
    (left,) = training.segments(replicas=True)
    flip(left, 7)
    job.restart_node(victim)
    # not before: a rank that met the gap first would end the round in another way
    training.until(lambda: all(training.starts(r)[-1:] == [6] for r in (0, 1)), "restore of step 6")
    training.open_gate()
    training.finish()
    assert training.starts(0)[-1] == training.starts(1)[-1] == 6
    assert training.said("cannot be used")
    training.is_as_if_nothing_happened()


def test_what_every_node_has_is_not_copied(training: Training) -> None:
    """DDP: replicas cost nothing."""
    begin(training, mode="ddp", nodes=2, nnodes="2")
    assert not training.segments(replicas=True)
    training.open_gate()
    training.finish()
