"""Two models in one script: one Checkpointer has both, and two are refused."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tests.further import further
from tests.snapshots.conftest import Training, ends
from tests.snapshots.pair import STEPS, Pair

PAIR = Path(__file__).with_name("pair.py")
ROOT = {"PYTHONPATH": os.fspath(PAIR.parents[2])}


@further(
    "training/checkpointing/test_checkpointer::test_all_of_a_training_comes_back_and_goes_on_bit_by_bit",
    "training/checkpointing/test_checkpointer::test_objects_in_state_are_parts_by_their_keys",
)
def test_a_gan_and_its_average_come_back_bit_by_bit(training: Training) -> None:
    """Compared with the same in one life, where nothing is restored."""
    training.start("--die=1:5", script=PAIR, max_restarts=1, env=ROOT)
    training.finish()
    assert training.starts(0) == training.starts(1) == [0, 5]
    torch.set_num_threads(1)
    alone = Pair()
    for step in range(STEPS):
        alone.step(step)
    assert [ends(training.out, rank) for rank in range(2)] == [[alone.fingerprint()]] * 2
    assert training.checkpoints()[-1] == STEPS


@further("training/checkpointing/test_checkpointer::test_a_rank_has_one_state")
def test_a_second_checkpointer_is_refused_where_it_is_made(training: Training) -> None:
    training.start("--two", script=PAIR, nproc=1, env=ROOT)
    training.finish(1)
    assert training.said(
        r"ConflictError: use one Checkpointer per process: pass all state to it under different "
        r"names, as in Checkpointer\(folder, model1=\.\.\., model2=\.\.\.\): this process has a "
        r"Checkpointer of model in .*/gen, so there cannot be one of model in .*/disc"
    )
    assert not training.ckpt.exists()
