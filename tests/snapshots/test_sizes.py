"""Other numbers of ranks, from memory and from storage; a state whose layout changes on the way."""

from __future__ import annotations

import pytest

from tests.further import further
from tests.snapshots.conftest import Training, told, until_printed

pytestmark = pytest.mark.slow


@further(
    "training/checkpointing/test_ranks::test_sharded_state_from_memory_at_another_number_of_ranks"
)
def test_more_ranks_from_memory(training: Training) -> None:
    """2 -> 3, FSDP2: a node comes, and shards are cut anew."""
    job = training.start(
        *("--print-at", "7"),
        mode="fsdp2",
        gated=True,
        nodes=2,
        nproc=1,
        nnodes="2:3",
        options=["--grow=now"],
    )
    training.comes_to(7)
    for rank in (0, 1):  # what it had in step 7: the newcomer's round ends it at the gate
        until_printed(training.out, rank)
    job.add_node()
    training.go_on()
    training.finish()
    assert training.starts(0) == [0, 7]
    assert training.starts(2) == [7]
    assert training.said("resume from step 7 in memory")
    is_the_same(training, 3)


@further(
    "training/checkpointing/test_ranks::test_with_torch_alone_checkpoints_are_plain_and_come_back_at_any_number"
)
def test_other_numbers_of_ranks_from_storage(training: Training) -> None:
    """4 -> 2 -> 3 by checkpoints that a failure, and then a pace, has left: three jobs."""
    train = ("--print-at", "7", "--print-at", "8", "--persist-every", "8")
    options = ["--save-at-breakpoint"]
    training.start(*train, "--die", "1:7:kill", mode="fsdp2", nproc=4, options=options)
    training.finish(1)
    training.start(*train, mode="fsdp2", nproc=2, steps=8)
    training.finish()
    training.start(*train, mode="fsdp2", nproc=3, steps=9)
    training.finish()
    assert training.starts(0) == [0, 7, 8]
    assert training.starts(2) == [0, 8]
    is_the_same(training, 4)


def is_the_same(training: Training, ranks: int) -> None:
    """Every life began with the bits that the one before it had ended with."""
    lines = [line for rank in range(ranks) for line in told(training.out, rank)]
    at = {line["at"] for line in lines if "at" in line}
    again = [line["again"] for line in lines if "again" in line]
    assert len(again) >= 3
    assert set(again) <= at
    assert len(set(again)) == len(at)


@further(
    "training/checkpointing/test_checkpointer::test_a_restore_to_before_the_first_step_of_the_optimizer"
)
def test_a_layout_that_changes(training: Training) -> None:
    """The optimizer's state grows in step 6: the old layout's snapshots serve until the first of
    the new one is whole."""
    training.start("--die", "1:5:kill", "--die", "0:6:kill", "--die", "1:8:kill", mode="late",
                   max_restarts=3, options=["--restart-backoff=0"])  # fmt: skip
    training.ends_as_if_undisturbed(0, 5, 6, 8, ranks=[0])
