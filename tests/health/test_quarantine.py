"""Quarantine by occupation: an excluded node stays, without ranks, so that nobody is given it."""

from __future__ import annotations

import re

import pytest

from elasticrun.wire.messages import JobStatus
from tests.further import further
from tests.health.jobs import CHECK, Health

pytestmark = pytest.mark.slow

PARK = "--quarantine=1"


def parked(status: JobStatus) -> list[str]:
    return [one.node for one in status.nodes if one.state == "parked"]


def test_an_excluded_node_stays_until_the_job_ends(health: Health) -> None:
    """Two train, the third holds its machine; also under another master. It ends with the job, and
    as the job did."""
    job = health.start("1:3", CHECK, PARK, fault="probe-fail=compute@node2")
    world = health.world_of(0, 1)
    job.wait_for(lambda status: parked(status) == ["node2"])
    agent = job.nodes[2]
    shown = health.shown()
    assert re.search(r"excluded: node2 on \S+ \(failed, parked, for 3\d\d\d s more\)", shown), shown
    assert health.listed().node == "node2"
    before = job.status().round
    job.kill_master()
    job.wait_for(lambda status: parked(status) == ["node2"], round=before and before.number)
    health.goes_on(world)
    assert agent.exit_code is None, health.said(2)
    assert all(one.pids == () for one in job.status().nodes if one.node == "node2"), "no rank"
    assert health.trained() == {0, 1}
    health.finish(0, 0, 0)
    assert "it stays parked until the job ends" in health.said(2)


@further("core/worker/test_parking", "test_an_excluded_node_stays_until_the_job_ends")
def test_it_stays_no_longer_than_it_is_excluded(health: Health) -> None:
    job = health.start("1:2", CHECK, PARK, "--exclude-for=4", fault="probe-fail=compute@node1")
    job.wait_for_output(1, "it stays parked until the job ends")
    world = health.world_of(0)
    assert "it has been parked for long enough" in health.excluded(1)
    health.goes_on(world)
    health.finish(0, 75)
