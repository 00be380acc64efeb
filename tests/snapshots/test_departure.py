"""A death signal to an agent: a step that all ranks save is written out before the node leaves."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from typing import Any

import psutil
import pytest

from elasticrun.config import EXIT_BAD_NODE, EXIT_SAVED
from elasticrun.testing import processes
from elasticrun.testing.steps import World
from tests.further import further
from tests.harness import processes_of
from tests.snapshots.conftest import Training, asked, ends, told, watermark

pytestmark = pytest.mark.slow

STEPS = 40
ASKED = re.compile(r"all ranks must save step (\d+)")


LONG = "--departure-grace=240"
"""Time to leave in which processes may stand still."""


def begin(training: Training, *args: str, mode: str = "ddp", **options: Any) -> World:
    """Two ranks, stopped at step 7, which is complete in memory; the master knows."""
    job = training.start(
        *args, mode=mode, gated=True, steps=STEPS, **{"options": [LONG], **options}
    )
    world = training.comes_to(7)
    # the ranks' log tells of step 7 before the agents do, and one of them may be about to go
    job.wait_for(lambda status: "step 7 is complete in memory" in status.snapshot)
    return world


def saves(training: Training) -> int:
    """Let ranks go on as far as the step that they are asked to save; the master tells it on one
    of the nodes. The one before is whole then: a rank does not wait for a slot for long, and
    another step would be named."""
    found: list[int] = []

    def told_now() -> bool:
        texts = [training.job.output(number) for number in range(len(training.job.nodes))]
        found[:] = [int(step) for text in texts for step in ASKED.findall(text)]
        return bool(found)

    def read() -> bool:
        return told_now() and {asked(path) for path in training.segments()} == {found[-1]}

    # where ranks read it: at the gate, which is that step, they cannot say that they are past it
    training.until(read, "step that is asked for")
    step = found[-1]
    training.open_gate(step - 1)
    training.until(
        lambda: {watermark(path) for path in training.segments()} == {step - 1},
        f"step {step - 1}, whole",
    )
    training.open_gate(step)
    return step


def one_of_two_leaves(training: Training, mode: str) -> int:
    """Of two nodes with a rank each, that of rank 1: the step that was saved, where the other one
    stands."""
    world = begin(training, mode=mode, nodes=2, nproc=1, nnodes="1:2")
    training.job.signal(world.nodes[1], signal.SIGTERM)
    step = saves(training)
    training.job.wait_for(round=training.round + 1, phase="running")
    return step


def test_one_node_leaves_and_the_other_goes_on(training: Training) -> None:
    """FSDP: half of the state goes with the node, and nothing is lost."""
    step = one_of_two_leaves(training, "fsdp2")
    assert training.checkpoints() == [step]
    training.open_gate()
    result = training.job.result()
    assert sorted(code or 0 for code in result.exit_codes) == [0, EXIT_SAVED]
    assert training.starts(0) == [0, step]
    assert told(training.out, 0)[-2]["seen"] == 12 * step
    assert len(ends(training.out, 0)) == 1
    assert not training.said("restarts 1")


@further("test_one_node_leaves_and_the_other_goes_on")
def test_one_node_leaves_and_all_have_the_same_state(training: Training) -> None:
    """DDP: the others go on from memory, without a step lost."""
    step = one_of_two_leaves(training, "ddp")
    training.open_gate()
    training.job.result()
    assert training.starts(0) == [0, step]
    assert training.said(rf"resume from step {step} in memory")


@further("slurm/test_batch::test_a_requeued_job_goes_on_where_it_was")
def test_the_only_node_leaves(training: Training) -> None:
    """As on Ctrl-C: the end is no incident."""
    run = training.out.parent / "run"
    begin(training, options=[LONG, f"--run-dir={run}"])
    training.job.signal(0, signal.SIGTERM)
    step = saves(training)
    training.finish(EXIT_SAVED)
    assert training.checkpoints() == [step]
    said = training.job.output(0)
    assert re.search(rf"ended by SIGTERM \(15\).*step {step} is saved in ", said)
    assert "incident" not in said
    assert (run / "result.json").exists()
    assert not [path for name in ("error.txt", "incidents/*") for path in run.glob(name)]


@further("slurm/test_batch::test_a_requeued_job_goes_on_where_it_was")
def test_all_nodes_leave_together(training: Training) -> None:
    """One step is named for both; the job is over when it is written, and may go on from there."""
    begin(training, mode="fsdp2", nodes=2, nproc=1, nnodes="2")
    for number in (0, 1):
        training.job.signal(number, signal.SIGTERM)
    for number in (0, 1):
        word = f"node node{number} must leave: "
        training.until(lambda word=word: training.said(word), word)
    step = saves(training)
    training.finish(EXIT_SAVED)
    assert training.checkpoints() == [step]
    assert len(set(ASKED.findall(training.job.output(0) + training.job.output(1)))) == 1


@further("core/worker/test_leaving", "core/worker/test_writing")
def test_a_node_leaves_between_two_rounds(training: Training) -> None:
    """FSDP: no rank can save a step then; what they had before one failed is written out first. (A
    rank that takes its time to end keeps the next round from beginning.)"""
    options = [LONG, "--restart-grace=240"]
    more = {"nproc": 1, "nnodes": "1:2", "max_restarts": 1, "options": options}
    world = begin(training, "--lingers", "0", mode="fsdp2", nodes=2, **more)
    job, leaves, stays = training.job, world.nodes[1], world.nodes[0]
    lingers = job.rank_pid(0)
    job.kill_rank(1)
    job.wait_for(lambda status: any(n.activity == "joining" for n in status.nodes))
    job.signal(leaves, signal.SIGTERM)
    training.until(lambda: training.said("stays until its part of a checkpoint is saved"), "wait")
    training.until(lambda: job.nodes[leaves].exit_code is not None, "end of the node that leaves")
    os.kill(lingers, signal.SIGKILL)
    training.go_on()
    result = job.result()
    assert [result.exit_codes[number] for number in (leaves, stays)] == [EXIT_SAVED, 0]
    assert training.starts(0) == [0, 7]
    assert training.checkpoints()[0] == 7


@further("slurm/test_batch::test_a_requeued_job_goes_on_where_it_was")
def test_every_process_is_signalled(training: Training) -> None:
    """As Slurm does: ranks end when they have saved, and nothing has failed. The next job goes on
    from there, to the same bits."""
    begin(training)
    agent = psutil.Process(training.job.nodes[0].pid)
    for process in [agent, *processes_of(processes.below(agent.pid))]:
        with suppress(psutil.NoSuchProcess):  # a store that was made ready, and is not needed
            process.terminate()
    step = saves(training)
    training.finish(EXIT_SAVED)
    assert training.checkpoints() == [step]
    assert training.said("exited on a signal that it had blocked")
    assert not training.said("failed|Traceback")
    training.start(steps=STEPS)
    training.ends_as_if_undisturbed(0, step)


@further("core/worker/test_leaving")
def test_no_step_is_saved_in_time(training: Training) -> None:
    """Ranks hang: the node goes when its grace is over, with what was in memory."""
    begin(training, mode="fsdp2", options=["--departure-grace=1"])
    training.job.signal(0, signal.SIGTERM)
    training.finish(1)
    assert training.said("no step was saved within 1 s: this node leaves without")
    assert training.checkpoints() == [7]


# ---------------------------------------------------------------- a node that is excluded


@further("core/worker/test_writing")
def test_an_excluded_node_stays_until_its_part_is_saved(training: Training) -> None:
    """FSDP: an agent dies and its node is found to be bad when the next one has taken its memory
    over. What it holds is written out before it goes."""
    job = training.start(
        mode="fsdp2",
        gated=True,
        nodes=2,
        nproc=1,
        nnodes="2",
        max_restarts=3,
        options=["--network-check", "--save-at-breakpoint"],
    )
    victim = training.comes_to(7).nodes[1]
    job.kill_agent(victim)
    job.nodes[victim].env = {"ELASTICRUN_FAULT": f"probe-fail=compute@node{victim}"}
    job.restart_node(victim)
    training.until(lambda: job.nodes[victim].exit_code == EXIT_BAD_NODE, "end of the bad node")
    assert re.search(
        r"excluded.*; this node stays until its part of a checkpoint is saved", job.output(victim)
    )
    assert training.checkpoints() == [7]
    job.signal(1 - victim, signal.SIGTERM)  # it waits for another one, to go on with that
    assert job.result().exit_codes[victim] == EXIT_BAD_NODE
