"""Replicas: a node that is lost with the only original of its part costs no step."""

from __future__ import annotations

from contextlib import suppress

import pytest

from elasticrun.testing.job import ElasticJob
from tests.further import further
from tests.snapshots.conftest import NOTICED, STEPS, Training, ends, flip, opened

pytestmark = pytest.mark.slow

ON_TWO = "step {} is complete in memory, on two nodes"


def begin(training: Training, mode: str = "fsdp2", **options: object) -> ElasticJob:
    """Two nodes of one rank, stopped at step 7, which is on both, as step 6 before it."""
    job = training.start("--replicas", "1", mode=mode, gated=True, nproc=1, **options)
    training.world = 2  # a third node is a spare
    training.all_there()
    for step in (6, 7):  # at the gate: a step that another one follows at once need not be copied
        reach(training, job, step)
    return job


def reach(training: Training, job: ElasticJob, step: int) -> None:
    """Let ranks go on to this step, and wait until it is on both nodes."""
    training.open_gate(step)
    job.wait_for_world(2, step=step)
    job.wait_for(lambda status: ON_TWO.format(step) in status.snapshot)


def is_copied(training: Training, step: int) -> bool:
    """Whether a node has a replica of it."""
    found = []
    for path in training.segments(replicas=True):
        with suppress(FileNotFoundError), opened(path) as segment:  # no node needs it any more
            found += [snapshot.step for snapshot in segment.snapshots()]
    return step in found


def test_a_spare_takes_over_what_the_lost_node_had(training: Training) -> None:
    """FSDP, a whole node with its memory: the others go on from memory, bit by bit the same."""
    # without a restart to spend, a job that is below its least number of nodes ends at once, and
    # the spare may be late
    job = begin(training, nodes=3, nnodes="2:2", together=True, max_restarts=1, silence=NOTICED)
    assert len(training.segments(replicas=True)) == 2
    job.kill_node(job.wait_for_world(2).nodes[1])
    training.lose_memory()
    training.go_on()
    training.ends_as_if_undisturbed(0, 7)
    assert training.said(r"resume from step 7 \(memory\)")
    assert not training.checkpoints()


@further("test_a_spare_takes_over_what_the_lost_node_had")
def test_the_rest_goes_on_alone(training: Training) -> None:
    """Fewer nodes: what was the lost one's is cut anew from its replica."""
    job = begin(training, nodes=2, nnodes="1:2", silence=NOTICED)
    job.kill_node(job.wait_for_world(2).nodes[1])
    training.lose_memory()
    training.go_on()
    training.finish()
    assert training.starts(0) == [0, 7]
    assert len(ends(training.out, 0)) == 1
    assert not training.checkpoints()


@further("snapshots/saver/test_transfer::test_what_rotted_on_the_other_node_is_found")
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
    assert training.said("is unusable")
    training.is_as_if_nothing_happened()


@further("core/snapshots/test_replication")
def test_what_every_node_has_is_not_copied(training: Training) -> None:
    """DDP: replicas cost nothing. (A step that one rank has more than a moment before the other is
    copied all the same: this or that one may be, on a machine that stands still, but not all.)"""
    job = begin(training, mode="ddp", nodes=2, nnodes="2")
    copied = [is_copied(training, 7)]
    for step in range(8, STEPS):
        reach(training, job, step)
        copied.append(is_copied(training, step))
    assert not all(copied)
    training.open_gate()
    training.finish()
