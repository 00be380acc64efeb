"""Training that is taken back to an older step, with real jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.further import further
from tests.snapshots.conftest import STEPS, Training, ends, told

pytestmark = pytest.mark.slow

OWN = Path(__file__).with_name("own.py")


@further("checkpointing/test_choosing::test_what_is_suspect_comes_last_and_never_after_nothing")
def test_what_is_suspect_comes_last_in_storage_too(training: Training) -> None:
    """Step 8 is in memory and in storage, and kills whoever goes on from it: training goes on from
    neither."""
    args = ("--every", "4", "--persist-every", "4", "--keep", "1", "--poison", "8")
    job = training.start(*args, gated=True, max_restarts=4)
    training.comes_to(8)
    training.until(lambda: 8 in training.checkpoints(), "checkpoint of step 8")
    job.kill_rank(1)
    job.wait_for(round=2, phase="running")
    training.open_gate(STEPS)
    training.until(lambda: training.checkpoints() == [STEPS], "the last checkpoint alone")
    training.open_gate()
    training.finish()
    assert training.starts(0) == [0, 8, 8, 4]
    assert training.said("step 8 and later ones come last")
    training.is_as_if_nothing_happened()


@further("checkpointing/test_choosing::test_a_step_that_is_not_there_is_refused_in_a_sentence")
def test_a_step_that_is_asked_for(training: Training) -> None:
    """A second start goes on from an older checkpoint, and leaves the newer ones; a third asks for
    one that is not there."""
    args = ("--every", "4", "--persist-every", "4")
    training.start(*args)
    training.finish()
    assert {4, 12} <= set(training.checkpoints()), "that of 8 may give way to that of 12"
    training.start(*args, options=["--restore-step=4"])
    training.finish()
    assert training.starts(0) == [0, 4]
    assert training.said("ranks go on from step 4 in storage: --restore-step")
    assert len(ends(training.out, 0)) == 2
    assert len(set(ends(training.out, 0))) == 1
    training.start(*args, options=["--restore-step=5"])
    training.finish(1)
    assert training.said("--restore-step=5: step 5 is not whole in memory, and .* has no whole")


@further("core/snapshots/test_choice")
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
