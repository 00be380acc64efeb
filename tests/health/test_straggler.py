"""A node that is slow while training: suspected by its own part of a step, and swapped for a spare
where the user wants that. Its ranks are slow for real (`slow=6x`)."""

from __future__ import annotations

import re

import pytest

from tests.counting import times
from tests.further import cases, further
from tests.health.jobs import PACES, Health

pytestmark = pytest.mark.slow

SOON = times(straggler_time=3)
SLOW = "slow=6x@node2"
EVIDENCE = r"own part of a step takes [\d.]+ m?s, the others' [\d.]+ m?s"


@further("test_a_straggler_is_swapped_for_a_spare")
def test_a_straggler_is_told_about(health: Health) -> None:
    """By its own time, not by the time of a step, which all nodes share. Nobody is excluded."""
    job = health.start("3", SOON, fault=SLOW, script=PACES)
    world = health.world_of(0, 1, 2)
    job.wait_for(lambda s: any(n.node == "node2" and "slow" in n.health for n in s.nodes))
    told = re.compile(rf"node2\b.*{EVIDENCE}")  # which is on its way when the page has it
    job.wait_for(lambda _: told.search(health.said()) is not None)
    assert job.status().excluded == ()
    health.goes_on(world)
    assert len(job.worlds()) == 1
    health.finish(0, 0, 0)


@pytest.mark.parametrize("spare", cases(["waits", "comes later"], soaked=["comes later"]))
def test_a_straggler_is_swapped_for_a_spare(health: Health, spare: str) -> None:
    """It ends with the code of the excluded; the spare takes its place at no cost of a restart."""
    conf = times(straggler_time=8) if spare == "waits" else SOON
    job = health.start("3:3", conf, "--exclude-straggler", fault=SLOW, script=PACES)
    first = health.world_of(0, 1, 2)
    if spare == "comes later":
        job.wait_for(lambda s: any("slow" in n.health for n in s.nodes))
    job.add_node()
    assert re.search(EVIDENCE, health.excluded(2)), health.said(2)
    listed = health.listed()
    assert (listed.node, listed.kind) == ("node2", "slow")
    second = health.world_of(0, 1, 3, since=first.began)
    assert second.restarts == 0
    health.goes_on(second)
    health.finish(0, 0, 75, 0)


@further("core/health/test_stragglers")
def test_a_straggler_is_left_out_where_the_rest_suffices(health: Health) -> None:
    job = health.start("2:3", SOON, "--exclude-straggler", fault=SLOW, script=PACES)
    first = health.world_of(0, 1, 2, since=0.0)  # it may be over by now
    health.excluded(2)
    second = health.world_of(0, 1, since=first.began)
    assert second.restarts == 0
    assert job.status().excluded[0].node == "node2"
    health.finish(0, 0, 75)


@further("core/health/test_stragglers")
def test_a_straggler_that_is_needed_stays(health: Health) -> None:
    """No spare, and never below min: it is told about, and training goes on."""
    job = health.start("3", SOON, "--exclude-straggler", fault=SLOW, script=PACES)
    world = health.world_of(0, 1, 2)
    job.wait_for(lambda s: any(n.node == "node2" and "slow" in n.health for n in s.nodes))
    health.goes_on(world)
    assert job.status().excluded == ()
    health.finish(0, 0, 0)
