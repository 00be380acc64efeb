"""A death signal to an agent: a step that all ranks save is written out before the node leaves."""

from __future__ import annotations

import re
import signal

import psutil
import pytest

from elasticrun.config import EXIT_SAVED
from tests.snapshots.conftest import Training, ends, told

pytestmark = pytest.mark.slow

STEPS = 40
ASKED = re.compile(r"every rank is asked to save step (\d+)")


def asked(training: Training) -> int:
    """The step that is asked for; the master tells it on one of the nodes."""
    found: list[int] = []

    def told_now() -> bool:
        texts = [training.job.output(number) for number in range(len(training.job.nodes))]
        found[:] = [int(step) for text in texts for step in ASKED.findall(text)]
        return bool(found)

    training.until(told_now, "step that is asked for")
    return found[-1]


def test_one_node_leaves_and_the_other_goes_on(training: Training) -> None:
    """FSDP: half of the state goes with the node, and nothing is lost."""
    job = training.start(mode="fsdp2", gated=True, steps=STEPS, nodes=2, nproc=1, nnodes="1:2")
    training.open_gate(7)
    world = job.wait_for_world(2, step=7)
    job.signal(world.nodes[1], signal.SIGTERM)
    step = asked(training)
    training.open_gate(step)
    job.wait_for(round=2, phase="running")
    assert training.checkpoints() == [step]
    training.open_gate()
    result = job.result()
    assert sorted(code or 0 for code in result.exit_codes) == [0, EXIT_SAVED]
    assert training.starts(0) == [0, step]
    assert told(training.out, 0)[-2]["seen"] == 12 * step
    assert len(ends(training.out, 0)) == 1
    assert not training.said("restarts 1")


def test_one_node_leaves_and_all_have_the_same_state(training: Training) -> None:
    """DDP: the others go on from memory, without a step lost."""
    job = training.start(gated=True, steps=STEPS, nodes=2, nproc=1, nnodes="1:2")
    training.open_gate(7)
    world = job.wait_for_world(2, step=7)
    job.signal(world.nodes[1], signal.SIGTERM)
    step = asked(training)
    training.open_gate(step)
    job.wait_for(round=2, phase="running")
    training.open_gate()
    job.result()
    assert training.starts(0) == [0, step]
    assert training.said(rf"go on from step {step} in memory")


def test_the_only_node_leaves(training: Training) -> None:
    job = training.start(gated=True, steps=STEPS)
    training.open_gate(7)
    job.wait_for_world(2, step=7)
    job.signal(0, signal.SIGTERM)
    step = asked(training)
    training.open_gate(step)
    training.finish(EXIT_SAVED)
    assert training.checkpoints() == [step]
    assert re.search(r"ended by SIGTERM \(15\).*all have saved is in storage", job.output(0))


def test_every_process_is_signalled(training: Training) -> None:
    """As Slurm does: ranks end when they have saved, and nothing has failed. The next job goes on
    from there, to the same bits."""
    job = training.start(gated=True, steps=STEPS)
    training.open_gate(7)
    job.wait_for_world(2, step=7)
    agent = psutil.Process(job.nodes[0].pid)
    for process in [agent, *agent.children(recursive=True)]:
        process.terminate()
    step = asked(training)
    training.open_gate(step)
    training.finish(EXIT_SAVED)
    assert training.checkpoints() == [step]
    assert training.said("ended by a signal that it had put off")
    assert not training.said("failed|Traceback")
    training.start(steps=STEPS)
    training.finish()
    assert training.starts(0) == training.starts(1) == [0, step]
    training.is_as_if_nothing_happened()


def test_no_step_is_saved_in_time(training: Training) -> None:
    """Ranks hang: the node goes when its grace is over, with what was in memory."""
    options = ["--departure-grace=1"]
    job = training.start(mode="fsdp2", gated=True, steps=STEPS, options=options)
    training.open_gate(7)
    job.wait_for_world(2, step=7)
    job.signal(0, signal.SIGTERM)
    training.finish(1)
    assert training.said("no step was saved within 1 s: this node leaves without")
    assert training.checkpoints() == [7]
