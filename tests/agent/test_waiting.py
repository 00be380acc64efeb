"""What users who see warnings only are told when ranks start."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticrun.agent.waiting import starting
from elasticrun.wire.ids import Endpoint, RoundName
from elasticrun.wire.messages import Start
from elasticrun.wire.saving import Restore

START = Start(RoundName(1, 3, "n"), 0, 2, 0, 4, 0, 4, 1, Endpoint("h", 1), host_store=False)


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (None, "the ranks start here: round 3 with 4 ranks on 2 nodes"),
        (START, "the ranks start again, at no restart's cost: round 3 with 4 ranks on 2 nodes"),
        (
            replace(START, restart_count=0),
            "the ranks start again: round 3 with 4 ranks on 2 nodes, restart 1 of 5",
        ),
    ],
)
def test_starting(last: Start | None, said: str) -> None:
    assert starting(START, last, 5) == said


def test_the_step_that_ranks_go_on_from_is_named() -> None:
    again = replace(START, restore=Restore(RoundName(1, 2, "n"), step=230, world_size=4))
    size = "round 3 with 4 ranks on 2 nodes"
    assert starting(again, None, 5) == f"the ranks start here: {size}, from step 230 in memory"
