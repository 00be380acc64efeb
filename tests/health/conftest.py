"""Jobs whose nodes are not all well: faults planted by $ELASTICRUN_FAULT, and what came of them.

Nodes are numbered in the order of their starts and are called node0, node1, ... What a check did is
read from exit codes, from the master's page, from what the agents say, and from which nodes' ranks
ever did a step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticrun.testing.job import ElasticJob
from elasticrun.testing.steps import World
from elasticrun.wire.messages import ExcludedNode
from tests.counting import Counting
from tests.harness import await_exit, await_true, passed, status_of


@pytest.fixture
def health(elastic_job: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Health]:
    """See `Health`; a node that left something behind fails the test."""
    created = Health(elastic_job, tmp_path)
    yield created
    if passed(request):
        created.close()


PACES = {"COUNTS_TELLS": "1", "COUNTS_PAUSE": "0.05"}
"""For a script with the line by which stragglers are found, and a part of its own in each step."""

CHECK = "--network-check"
EXCLUDED = 75

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Of every probe and rank: agents share the cores here, and threads that wait for each other in a
loop, as OpenMP's do, would make a matmul ten times as long, now of this node and now of that."""


class Health(Counting):
    """The job of one test; see the module's head."""

    def start(self, nnodes: str, *options: str, fault: str = "", **more: Any) -> ElasticJob:
        """As others, the larger number of nodes together if not said otherwise; `fault` is told to
        all of them."""
        env = {**ONE_THREAD, **more.pop("env", {})}
        env |= {"ELASTICRUN_FAULT": fault} if fault else {}
        words = {"nodes": int(nnodes.rpartition(":")[2]), "together": True, **more}
        return super().start(nnodes, *options, env=env, **words)

    def told(self, pattern: str) -> str:
        """Wait until somebody has said this (the line may be on its way when what it tells of is
        seen already); all that was said."""
        await_true(lambda: re.search(pattern, self.said()), f"word of {pattern}")
        return self.said()

    def excluded(self, number: int) -> str:
        """Wait until this node's agent has ended because it was excluded; what it said, in a line
        of its own on stderr."""
        node = self.job.nodes[number]
        assert not await_exit([node.pid]), f"{node.name} still runs:\n{node.tail()}"
        assert node.exit_code == EXCLUDED, f"exit code {node.exit_code}:\n{self.said(number)}"
        found = re.findall(r".*\bexcluded\b.*", self.said(number))
        assert found, self.said(number)
        return str(found[-1])

    def listed(self) -> ExcludedNode:
        """The one node on the list of excluded nodes."""
        (found,) = self.job.status().excluded
        return found

    def shown(self) -> str:
        return status_of(self.endpoint)

    def measured(self) -> str:
        """What the last probes of each node have measured; for the message of a failure."""
        return "\n".join(f"{one.node}: {one.health}" for one in self.job.status().nodes)

    def trained(self) -> set[int]:
        return {step.node for step in self.job.steps()}

    def world_of(self, *numbers: int, since: float | None = None) -> World:
        """Wait for a world of these nodes, one rank each."""
        world = self.job.wait_for_world(len(numbers), since=since)
        assert set(world.nodes.values()) == set(numbers), world
        return world
