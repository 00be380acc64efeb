"""Slow nodes: one whose probes take several times as long, or its own part of a step while training
(`slow=6x`: for real), is told about with its figures, and left out where the user wants that."""

from __future__ import annotations

import re

import pytest

from tests.counting import times
from tests.further import cases, further
from tests.health.conftest import CHECK, PACES, Health

pytestmark = pytest.mark.slow

RATIO = "--straggler-ratio=2"
LONG = times(probe_timeout=180)
"""A probe that is slow on a slow machine has not failed."""

SLOW = "slow=40x"
"""Agents and whatever else runs share two cores here, so that equal nodes differ by much: the
planted one is slower by far more than that, in its matmul and in its all_reduce; which of the two
shows first is all the same."""

EVIDENCE = r"[\d.]+ (ms|us|s)\b.*, the others [\d.]+ (ms|us|s).*limit [\d.]+ (ms|us|s)"


@further("core/health/test_slow")
@pytest.mark.parametrize("flags", [(), ("--exclude-straggler",)], ids=["told", "needed"])
def test_a_slow_node_is_told_about(health: Health, flags: tuple[str, ...]) -> None:
    """It trains with the others, which never are fewer than min, whatever was wanted; the reason
    has its figure, the others' and the limit."""
    job = health.start("4", CHECK, RATIO, LONG, *flags, fault=f"{SLOW}@node3")
    health.world_of(0, 1, 2, 3)
    health.told(rf"node3\b.*slow.*{EVIDENCE}")
    if flags:
        health.told(r"node3\b.*slow, measured twice")
    assert job.status().excluded == ()
    assert "slow" in next(n.health for n in job.status().nodes if n.node == "node3")
    health.finish(0, 0, 0, 0)


@further("core/health/test_slow")
def test_a_slow_node_is_left_out_where_that_is_wanted(health: Health) -> None:
    """The two others are there first: a check without one of them would need the slow node."""
    flags = (RATIO, LONG, "--exclude-straggler", "--grow=now")
    job = health.start("2:3", CHECK, *flags, nodes=2, fault=f"{SLOW}@node2")
    health.world_of(0, 1)
    job.add_node()
    assert re.search(EVIDENCE, health.excluded(2)), health.measured()
    assert health.listed().kind == "slow"
    health.world_of(0, 1)
    health.finish(0, 0, 75)
    assert health.trained() == {0, 1}


@further("core/health/test_slow")
def test_nodes_that_are_alike_are_not_called_slow(health: Health) -> None:
    """The measure is noisy on two shared cores; that convicts nobody."""
    job = health.start("4", CHECK, "--straggler-ratio=4", "--exclude-straggler")
    health.world_of(0, 1, 2, 3)
    assert job.status().excluded == (), health.measured()
    health.finish(0, 0, 0, 0)


# ---------------------------------------------------------------- while training


SOON = times(straggler_time=3)
SLOW_STEPS = "slow=6x@node2"
OWN_PART = r"own part of a step takes [\d.]+ m?s, the others' [\d.]+ m?s"


@further("test_a_straggler_is_swapped_for_a_spare", "core/health/test_stragglers")
@pytest.mark.parametrize("flags", [(), ("--exclude-straggler",)], ids=["told", "needed"])
def test_a_straggler_is_told_about(health: Health, flags: tuple[str, ...]) -> None:
    """By its own time, not by the time of a step, which all nodes share. Nobody is excluded: there
    is no spare, and never are there fewer than min, whatever was wanted."""
    job = health.start("3", SOON, *flags, fault=SLOW_STEPS, env=PACES)
    world = health.world_of(0, 1, 2)
    job.wait_for(lambda s: any(n.node == "node2" and "slow" in n.health for n in s.nodes))
    health.told(rf"node2\b.*{OWN_PART}")
    health.goes_on(world, 40)
    assert job.status().excluded == ()
    health.finish(0, 0, 0)
    assert [row["cause"] for row in health.adds_up() if row["category"] == "slow"] == ["node2"]


@pytest.mark.parametrize("spare", cases(["waits", "comes later"], soaked=["comes later"]))
def test_a_straggler_is_swapped_for_a_spare(health: Health, spare: str) -> None:
    """It ends with the code of the excluded; the spare takes its place at no cost of a restart."""
    conf = times(straggler_time=8) if spare == "waits" else SOON
    job = health.start("3:3", conf, "--exclude-straggler", fault=SLOW_STEPS, env=PACES)
    first = health.world_of(0, 1, 2)
    if spare == "comes later":
        job.wait_for(lambda s: any("slow" in n.health for n in s.nodes))
    job.add_node()
    assert re.search(OWN_PART, health.excluded(2)), health.said(2)
    listed = health.listed()
    assert (listed.node, listed.kind) == ("node2", "slow")
    second = health.world_of(0, 1, 3, since=first.began)
    assert second.restarts == 0
    health.goes_on(second)
    health.finish(0, 0, 75, 0)


@further("core/health/test_stragglers")
def test_a_straggler_is_left_out_where_the_rest_suffices(health: Health) -> None:
    job = health.start("2:3", SOON, "--exclude-straggler", fault=SLOW_STEPS, env=PACES)
    first = health.world_of(0, 1, 2, since=0.0)  # it may be over by now
    health.excluded(2)
    second = health.world_of(0, 1, since=first.began)
    assert second.restarts == 0
    assert job.status().excluded[0].node == "node2"
    health.finish(0, 0, 75)
