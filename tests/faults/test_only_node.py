"""The only node of all falls silent: somebody has stopped it, and nobody could take its place."""

from __future__ import annotations

import pytest

from elasticrun.config import HEARTBEAT_TIMEOUT
from tests.counting import Counting, times

pytestmark = pytest.mark.slow

USUAL = times(heartbeat_timeout=HEARTBEAT_TIMEOUT)
"""A node of several would be given up by then."""


def test_an_agent_that_was_stopped_goes_on(counting: Counting) -> None:
    """Ctrl-Z, and `fg` later: the ranks, which nobody stopped here, are the same, and so is the
    round."""
    job = counting.start("1", USUAL)
    world = counting.first(1)
    job.freeze_node(0, agent_only=True)
    job.wait_for(lambda status: [node.state for node in status.nodes] == ["suspect"])
    counting.goes_on(world, 300)  # six seconds at least: a node of several has five left
    assert [node.state for node in job.status().nodes] == ["suspect"]
    job.thaw_node(0)
    job.wait_for(lambda status: [node.state for node in status.nodes] == ["alive"])
    (only,) = counting.finish()
    assert only.pids == world.pids
