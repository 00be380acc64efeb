"""Nodes come: together, late, spread over time, again and again."""

from __future__ import annotations

import re
import time

import pytest

from tests.counting import Counting, keeps_ranks, let_pass, times
from tests.further import further
from tests.harness import LIMIT

pytestmark = pytest.mark.slow


@further("e2e/test_surroundings::test_behind_a_proxy")
def test_nodes_that_start_together_make_one_world(counting: Counting) -> None:
    """2 agents of 1:4: nobody waits for nodes that do not exist, and nobody begins alone, unless a
    busy machine has held the other one up until then."""
    job = counting.start("1:4", nodes=2, together=True, env={"LOGLEVEL": "DEBUG"})
    counting.first(2)
    assert len(counting.finish()) == 1
    assert said_at(counting.said(), "round 1 begins")
    for early in job.worlds()[:-1]:
        (late,) = {0, 1} - set(early.nodes.values())
        assert said_at(job.output(late), "the job's page") > said_at(
            counting.said(), "round 1 begins"
        ), counting.said()


def said_at(words: str, text: str) -> str:
    """The date and time of the first line with this text; later ones sort after it. Lines have a
    time where LOGLEVEL is DEBUG."""
    found = re.search(rf"[IW](\d{{4}} \d\d:[\d:.]+) .*{text}", words)
    assert found, words
    return found[1]


@further("faults/test_in_a_row::test_one_job_of_three_bears_one_harm_after_another")
def test_a_node_joins_a_young_round(counting: Counting) -> None:
    """In at once, the survivors' ranks unchanged, and no restart is charged."""
    job = counting.start("1:3", nodes=2)
    first = counting.first(2)
    began = time.monotonic()
    job.add_node()
    second = job.wait_for_world(3, since=began)
    assert second.restarts == 0
    assert keeps_ranks(first, second)
    assert second.nodes[2] == 2
    assert len(counting.finish()) == 2


@further("core/test_deadlines")
def test_a_node_that_finds_an_old_round_waits(counting: Counting) -> None:
    """After its first minute a round is not given up for a newcomer before the cool-down is over;
    who waits is told why, and status says until when."""
    job = counting.start("1:2", times(grow_cooldown=90), nodes=1)
    first = counting.first(1)
    began = time.monotonic()
    let_pass(62)  # it is not young any more
    job.add_node()
    job.wait_for_output(1, "pending: joins 90 s after the round began")
    assert "pending" in job.status().reason
    counting.goes_on(first)
    second = job.wait_for_world(2, since=began)
    assert second.began - began > 80
    assert keeps_ranks(first, second)
    assert len(counting.finish()) == 2


@further("sim/test_storms::test_eight_agents_started_unevenly_over_forty_seconds")
@pytest.mark.parametrize("spread", [10.0, 40.0])
def test_eight_agents_started_one_after_another(counting: Counting, spread: float) -> None:
    """8 agents of 2:8: at most two worlds."""
    began = time.monotonic()
    job = counting.start("2:8", nodes=1)
    for number in range(1, 8):
        let_pass(began + number * spread / 7 - time.monotonic())
        job.add_node()
    whole = job.wait_for_world(8, timeout=2 * LIMIT)
    assert whole.restarts == 0
    assert len(counting.finish()) <= 2


@further(
    "sim/test_chaos", "faults/test_in_a_row::test_one_job_of_three_bears_one_harm_after_another"
)
def test_a_newcomer_that_comes_and_dies_again_and_again(counting: Counting) -> None:
    """Each of its joins could begin last call anew. It cannot keep two others from their world, and
    when it stays away they go on undisturbed."""
    # a newcomer whose end nobody else has seen is given up for its silence: not after a minute
    job = counting.start("2:8", times(last_call_timeout=2, heartbeat_timeout=10), nodes=1)
    stay = 0, job.nodes.index(job.add_node())
    end = time.monotonic() + LIMIT
    while not any(set(stay) <= set(world.nodes.values()) for world in job.worlds()):
        assert time.monotonic() < end, counting.said()
        number = job.nodes.index(job.add_node())
        # it has joined, and is told what it waits for or that it has a place
        place = "this node joined|the job starts"
        job.wait_for_output(number, re.compile(f"last call|pending|{place}"))
        job.kill_node(number)
    # the last newcomer may have had a place in a world that is over by now, or soon will be
    newest = max(world.last for world in job.worlds())
    world = job.wait_for_world(2, step=newest + 5)
    assert set(world.nodes.values()) == set(stay)
    assert world.restarts == 0
    counting.goes_on(world)
    counting.finish()
