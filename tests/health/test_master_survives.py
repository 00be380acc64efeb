"""kill -9 of the master in the middle of a check, and after a verdict: the check is made again, and
the verdict stands."""

from __future__ import annotations

import re

import pytest

from tests.counting import times
from tests.further import further
from tests.health.jobs import CHECK, Health

pytestmark = pytest.mark.slow


@further("sim/test_chaos::test_invariants_hold_with_the_network_check")
def test_killed_in_the_middle_of_a_check(health: Health) -> None:
    """A probe hangs, so that the moment can be met. The next master checks anew, and comes to the
    same."""
    job = health.start("2:3", CHECK, times(probe_timeout=15), fault="probe-hang=comm@node2")
    job.wait_for(lambda s: "check" in s.reason)
    job.kill_master()
    assert re.search(r"in comm with .*hung", health.excluded(2))
    health.world_of(0, 1)
    health.finish(0, 0, 75)


@further("sim/test_chaos::test_invariants_hold_with_the_network_check", "core/job/test_facts")
def test_killed_after_a_verdict(health: Health) -> None:
    """Ranks do not notice, the list is the same, and who stands on it is refused. (A record lasts
    as long as the agent that started the first master: that must not be the bad one here.)"""
    job = health.start("1:2", CHECK, fault="probe-fail=compute@node1", together=False)
    health.excluded(1)
    world = health.world_of(0)
    before = health.listed()
    job.kill_master()
    job.wait_for_output(0, "the master answers again")
    job.wait_for(lambda s: bool(s.excluded))
    after = health.listed()
    assert (after.node, after.host, after.reason) == (before.node, before.host, before.reason)
    assert after.remaining <= before.remaining
    job.nodes[1].env = {"ELASTICRUN_FAULT": ""}
    job.restart_node(1)
    assert re.search(r"excluded .*\d+ s\b", health.excluded(1)), health.said(1)
    health.goes_on(world)
    health.finish(0, 75)


@further("sim/test_chaos::test_invariants_hold_with_the_network_check")
def test_killed_while_checked_nodes_train(health: Health) -> None:
    """Who trains is trusted: no round ends, and nobody is probed again."""
    job = health.start("2", CHECK)
    world = health.world_of(0, 1)
    job.kill_master()
    job.wait_for_output(0, "the master answers again")
    health.goes_on(world, 20)
    health.finish(0, 0)
