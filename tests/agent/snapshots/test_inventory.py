"""What of the memory of a node its master is told, row by row."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from elasticrun.agent.snapshots.inventory import Inventory, WantedSnapshots
from elasticrun.snapshots.shm.throttle import Throttle
from tests.agent.snapshots.played import BOTH, CONTENT, LAYOUT, LIMIT
from tests.agent.snapshots.test_segments import LIFE, SIZES, using, write

pytestmark = pytest.mark.slow

A, B = (CONTENT, 0), (0, CONTENT)
"""Rows of a step that only one of the two ranks has committed."""

ADOPTED = {
    "one step": (((1,), (1,)), [(1, BOTH)]),
    "two steps of one round": (((1, 2), (1, 2)), [(2, BOTH), (1, BOTH)]),
    "a gap beside what is whole": (((2, 3), (1, 2)), [(2, BOTH)]),
    "nothing whole": (((1,), (2,)), [(2, B), (1, A)]),
    "one rank alone": (((1, 2), ()), [(2, A), (1, A)]),
}
"""Steps that each rank of the agent before had committed, and the rows that are told."""


@pytest.mark.parametrize("may_write", [False, True])
@pytest.mark.parametrize("case", ADOPTED)
async def test_what_the_agent_before_held_is_told(shm: Path, case: str, may_write: bool) -> None:
    """`may_write`: ranks of this agent's round run already, which says nothing of older ones."""
    steps, told = ADOPTED[case]
    async with using(shm) as segments:
        router = SimpleNamespace(tidy=lambda: None)
        inventory = Inventory(segments, WantedSnapshots(segments, LIMIT, router), 2)
        inventory.adopt([LIFE])
        for local_rank, committed in enumerate(steps):
            held = await segments.segment_for(local_rank, SIZES, LAYOUT.content, Throttle())
            for step in committed:
                write(held, step)
        rows = inventory.holdings(may_write=may_write)
        assert [(row.step, row.contents) for row in rows] == told
        assert {(row.round, row.first_rank, row.world_size) for row in rows} == {
            (LIFE.name, LIFE.first_rank, LIFE.info.world_size)
        }
