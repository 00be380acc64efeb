"""A node that is excluded and has the only copy of a part of the state."""

from __future__ import annotations

import re
import signal

import pytest

from elasticrun.config import EXIT_BAD_NODE
from tests.further import further
from tests.snapshots.conftest import Training

pytestmark = pytest.mark.slow


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
