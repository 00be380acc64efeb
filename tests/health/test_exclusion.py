"""What follows from a verdict: the list, who is refused and for how long, the way back, and a job
that has too few nodes left."""

from __future__ import annotations

import json
import re
import urllib.request
from typing import Any

import pytest

from elasticrun.wire.messages import JobStatus
from tests.further import further
from tests.health.jobs import CHECK, Health

pytestmark = pytest.mark.slow

BAD = "probe-fail=compute@node1"


def test_the_list_is_served_to_schedulers(health: Health) -> None:
    """/status, /metrics and `elasticrun status` name the node, its host and the verdict."""
    health.start("1:2", CHECK, fault=BAD)
    health.excluded(1)
    health.world_of(0)
    url = _page(health.said(0))
    page = _json(f"{url}status")
    (listed,) = page["excluded"]
    assert listed["node"] == "node1"
    assert listed["host"] == next(n["host"] for n in page["nodes"] if n["node"] == "node0")
    assert "compute" in listed["reason"]
    assert 3000 < listed["remaining"] <= 3600
    with urllib.request.urlopen(f"{url}metrics", timeout=240) as answer:
        assert re.search(r"^elasticrun_\w*excluded\w* 1\.0$", answer.read().decode(), re.M)
    shown = health.shown()
    assert re.search(r"excluded.*node1|node1.*excluded", shown, re.S), shown
    health.finish(0, 75)


@further("core/nodes/test_admission", "test_the_list_is_served_to_schedulers")
def test_an_excluded_node_is_refused(health: Health) -> None:
    """It says for how long; the round of the others is not disturbed."""
    job = health.start("1:2", CHECK, fault=BAD)
    health.excluded(1)
    world = health.world_of(0)
    job.nodes[1].env = {}  # mended, but that is not asked
    for _ in range(2):
        job.restart_node(1)
        assert re.search(r"excluded .*\d+ s\b", health.excluded(1)), health.said(1)
    health.goes_on(world)
    health.finish(0, 75)


def test_a_node_that_gets_well(health: Health) -> None:
    """When its time is over it is probed anew, alone and with a partner, and let in."""
    job = health.start("1:2", CHECK, "--exclude-for=4", "--grow=now", fault=BAD)
    health.excluded(1)
    first = health.world_of(0)
    job.wait_for(lambda status: not status.excluded)
    job.nodes[1].env = {"ELASTICRUN_FAULT": ""}
    job.restart_node(1)
    health.world_of(0, 1, since=first.began)
    assert all("with node" in node.health for node in job.status().nodes), job.status()
    health.finish(0, 0)


@further("test_a_node_that_gets_well")
def test_a_node_that_is_still_bad(health: Health) -> None:
    """Its time is over, its fault is not: it is excluded again, at the door, and no round ends."""
    job = health.start("1:2", CHECK, "--exclude-for=4", fault=BAD)
    health.excluded(1)
    world = health.world_of(0)
    job.wait_for(lambda status: not status.excluded)
    before = len(health.said(1))
    job.restart_node(1)
    health.excluded(1)
    assert "compute" in health.said(1)[before:]
    health.goes_on(world)
    health.finish(0, 75)


@further("core/job/test_health", "sim/test_chaos::test_invariants_hold_with_the_network_check")
def test_a_bad_newcomer_stops_nobody(health: Health) -> None:
    """Two train; the third is probed at the door, and the round goes on without a pause."""
    job = health.start("1:3", CHECK, nodes=2)
    world = health.world_of(0, 1)
    job.add_node(env={"ELASTICRUN_FAULT": "probe-fail=compute@node2"})
    health.excluded(2)
    health.goes_on(world)
    health.finish(0, 0, 75)


@further("core/job/test_health")
def test_a_good_newcomer_is_let_in(health: Health) -> None:
    """Probed at the door, paired at the next gathering."""
    job = health.start("1:3", CHECK, "--grow=now", nodes=2)
    first = health.world_of(0, 1)
    job.add_node()
    world = health.world_of(0, 1, 2, since=first.began)
    assert world.restarts == 0
    health.finish(0, 0, 0)


@further("core/nodes/test_admission")
def test_an_exclusion_below_min(health: Health) -> None:
    """The rest waits and says why, and trains when a healthy node has come."""
    job = health.start("2:2", CHECK, fault=BAD)
    health.excluded(1)
    # not before: the other one may be probed once more when the verdict is given
    job.wait_for(lambda status: "node1" in status.reason and "excluded" in status.reason)
    assert health.trained() == set()
    job.add_node(env={"ELASTICRUN_FAULT": ""})
    health.world_of(0, 2)
    health.finish(0, 75, 0)


@further("core/worker/test_probing")
def test_a_node_whose_rank_failed_is_probed(health: Health) -> None:
    """Its ranks die of the script, its probes are good: the next round has it again. Its partner
    is probed with it, as nobody else could be."""
    job = health.start("2", CHECK, max_restarts=1)
    first = health.world_of(0, 1)
    job.kill_rank(1)
    second = health.world_of(0, 1, since=first.began)
    assert second.restarts == 1
    # A busy machine may look slow and be measured in one more pass; the checks are counted.
    said = health.told(r"(?s)(network check of 2 nodes \(.*){2}")
    assert said.count("network check of 2 nodes (") == 2, said
    for number in (0, 1):
        job.wait_for_output(number, re.compile("(?s)(this machine is being probed with node.*){2}"))
    health.finish(0, 0)


def _page(said: str) -> str:
    found = re.search(r"http://[^\s/]+/", said)
    assert found, said
    return found[0]


def _json(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=240) as answer:
        page: dict[str, Any] = json.loads(answer.read())
    return page


# ---------------------------------------------------------------- quarantine by occupation


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
