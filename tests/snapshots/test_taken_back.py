"""Training that is taken back to an older step, with real jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.snapshots.conftest import STEPS, Training, told

pytestmark = pytest.mark.slow

OWN = Path(__file__).with_name("own.py")


def test_poison_that_stands_in_storage_is_passed_over(training: Training) -> None:
    """Step 8 is in memory and in storage, and kills whoever goes on from it: training goes on from
    neither."""
    args = ("--persist-every", "4", "--keep", "1", "--poison", "8")
    job = training.start(*args, gated=True, max_restarts=4)
    training.open_gate(8)
    job.wait_for_world(2, step=8)
    training.until(lambda: 8 in training.checkpoints(), "checkpoint of step 8")
    job.kill_rank(1)
    job.wait_for(round=2, phase="running")
    training.open_gate(STEPS)
    training.until(lambda: training.checkpoints() == [STEPS], "the last checkpoint alone")
    training.open_gate()
    training.finish()
    assert training.starts(0) == [0, 8, 8, 7]
    assert training.said("step 8 and later ones are passed over")
    training.is_as_if_nothing_happened()


def test_a_living_rank_is_given_back_what_it_has_alone(training: Training) -> None:
    """Equal weights, a node a rank: rank 1 dies before it holds step 5, which rank 0 alone could
    give. All go on from step 4, or rank 1's own state would be lost."""
    training.start("--steps", "8", script=OWN, nodes=2, nproc=1, nnodes="2", max_restarts=1)
    training.finish()
    for rank in (0, 1):
        assert [(line["start"], line["number"]) for line in told(training.out, rank)] == [
            (0, 0),
            (4, 4),
        ]
    assert training.said("step 5 is left for step 4: it lacks what rank 1 had alone")
