"""Who cannot be reached, and what looks for the cause."""

from __future__ import annotations

from types import SimpleNamespace

from msgspec.structs import replace

from elasticrun.agent.farewell import sentence
from elasticrun.agent.node import Node
from elasticrun.agent.workers.ranks import directed
from elasticrun.config import EXIT_FAILED
from elasticrun.core.events import Exit, Note
from tests.agent.test_story import FIRST, Told, after


def test_a_master_that_does_not_answer() -> None:
    assert directed("no job master answers at h:1", "h:1").endswith(
        ": elasticrun doctor --rdzv-endpoint=h:1"
    )
    lost = Exit(EXIT_FAILED, "no master answered for 600 s", (), 0)
    assert sentence(lost) == f"{lost.reason}; to find out why, run here: elasticrun doctor"

    silent = "f names the job master at h:1 (b), which does not answer this node; it is asked again"
    assert directed(silent, "h:1").endswith(": elasticrun doctor --rdzv-endpoint=h:1")


def test_the_brains_own_warning_is_directed_where_it_is_printed() -> None:
    """What is for people alone: scripts and pages have the brain's sentence as it is."""
    node = object.__new__(Node)
    node._meeting = SimpleNamespace(dial="h:1")  # type: ignore[assignment]
    said = "no master answers (reset); this node goes on for 60 s"
    assert node._directed(Note(said, "warning")) == (
        f"{said}; to find out why, run here: elasticrun doctor --rdzv-endpoint=h:1"
    )
    assert node._directed(Note(said)) == said


def test_a_node_that_is_not_heard() -> None:
    told = Told(first=replace(FIRST, group_world_size=2, world_size=4))
    why = "node b is dead: its connection broke and nothing was heard for 5.0 s"
    assert told.restart(after(FIRST, why=why))[0] == (
        f"{why}; restarting the ranks with 1 node, world size 2 (no restart used); to find out why,"
        " run on that node: elasticrun doctor"
    )


def test_other_ends_name_no_doctor() -> None:
    assert directed("rank 3 on node b: ValueError: bad luck") == (
        "rank 3 on node b: ValueError: bad luck"
    )
