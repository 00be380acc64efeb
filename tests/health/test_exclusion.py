"""What follows from a verdict: the list, who is refused and for how long, the way back, a job that
has too few nodes left; and all that with kill -9 of the master in the middle."""

from __future__ import annotations

import json
import re
import urllib.request

import pytest

from tests.counting import times
from tests.further import further
from tests.health.conftest import CHECK, Health

pytestmark = pytest.mark.slow

BAD = "probe-fail=compute@node1"


def test_the_list_is_served_to_schedulers(health: Health) -> None:
    """/status, /metrics and `elasticrun status` name the node, its host and the verdict."""
    health.start("1:2", CHECK, fault=BAD)
    health.excluded(1)
    health.world_of(0)
    url = re.findall(r"http://[^\s/]+/", health.said(0))[0]
    with urllib.request.urlopen(f"{url}status", timeout=240) as answer:
        page = json.loads(answer.read())
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


@further(
    "core/scripts/netcheck_excluded_comes_back.txt", "health/test_network_check::test_a_bad_node"
)
def test_a_node_that_gets_well(health: Health) -> None:
    """When its time is over and its fault is not, it is excluded again, at the door, and no round
    ends. Well, it is probed anew, alone and with a partner, and let in."""
    job = health.start("1:2", CHECK, "--exclude-for=4", "--grow=now", fault=BAD)
    health.excluded(1)
    first = health.world_of(0)
    job.wait_for(lambda status: not status.excluded)
    before = len(health.said(1))
    job.restart_node(1)
    health.excluded(1)
    assert "compute" in health.said(1)[before:]
    health.goes_on(first)
    job.wait_for(lambda status: not status.excluded)
    job.nodes[1].env = {"ELASTICRUN_FAULT": ""}
    job.restart_node(1)
    health.world_of(0, 1, since=first.began)
    assert all("with node" in node.health for node in job.status().nodes), job.status()
    health.finish(0, 0)


@further("core/job/test_health", "sim/test_chaos::test_invariants_hold_with_the_network_check")
def test_newcomers_are_probed_at_the_door(health: Health) -> None:
    """Two train; the third is bad, and the round goes on without a pause. The fourth is good, and
    paired at the next gathering."""
    job = health.start("1:4", CHECK, "--grow=now", nodes=2)
    world = health.world_of(0, 1)
    job.add_node(env={"ELASTICRUN_FAULT": "probe-fail=compute@node2"})
    health.excluded(2)
    health.goes_on(world)
    job.add_node()
    assert health.world_of(0, 1, 3, since=world.began).restarts == 0
    health.finish(0, 0, 75, 0)


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


@further("core/nodes/test_admission", "core/job/test_facts")
def test_killed_after_a_verdict(health: Health) -> None:
    """Ranks do not notice, the list is the same, and who stands on it is refused as before. (A
    record lasts as long as the agent that started the first master: not the bad one's.)"""
    job = health.start("1:2", CHECK, fault="probe-fail=compute@node1", together=False)
    health.excluded(1)
    world = health.world_of(0)
    before = health.listed()
    job.nodes[1].env = {"ELASTICRUN_FAULT": ""}  # mended, but that is not asked
    refused(health)
    job.kill_master()
    job.wait_for_output(0, "the master answers again")
    job.wait_for(lambda s: bool(s.excluded))
    after = health.listed()
    assert (after.node, after.host, after.reason) == (before.node, before.host, before.reason)
    assert after.remaining <= before.remaining
    refused(health)
    health.goes_on(world)
    health.finish(0, 75)


def refused(health: Health) -> None:
    """Node 1, which says for how long."""
    before = len(health.said(1))
    health.job.restart_node(1)
    health.excluded(1)
    assert re.search(r"excluded .*\d+ s\b", health.said(1)[before:]), health.said(1)


@further("sim/test_chaos::test_invariants_hold_with_the_network_check")
def test_killed_while_checked_nodes_train(health: Health) -> None:
    """Who trains is trusted: no round ends, and nobody is probed again."""
    job = health.start("2", CHECK)
    world = health.world_of(0, 1)
    job.kill_master()
    job.wait_for_output(0, "the master answers again")
    health.goes_on(world, 20)
    health.finish(0, 0)
