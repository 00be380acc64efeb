"""What a master that knows of no round makes of what agents have noted of the last one; by hand."""

from __future__ import annotations

import pytest

from elasticrun.core.snapshots.snapshots import Snapshots
from elasticrun.wire import messages as m
from elasticrun.wire.types import Endpoint, RoundName, Skip
from tests.core.snapshots.saves import R1, R2, fails_soon, step_of

NEW = RoundName(2, 1, "z")
FROM_100 = m.RoundInfo(R2, 2, restore=m.Restore(R1, 100, 2))


def holdings(
    node: str, last: m.RoundInfo | None, *keys: tuple[RoundName, int], content: int = 0
) -> m.Holdings:
    rank = "ab".index(node)
    held = tuple(m.Holding(*key, rank, 2, (content or rank + 1,), wanted=False) for key in keys)
    return m.Holdings(Endpoint(node, 7000), held, last=last)


class Blind(Snapshots):
    """Of a master that was started anew, of term 2."""

    def __init__(self, *, at_breakpoint: bool = True) -> None:
        super().__init__(m.SaveSpec(at_breakpoint, 60.0), lambda: "try", 2)

    def hears(
        self, node: str, last: m.RoundInfo | None, *keys: tuple[RoundName, int], content: int = 0
    ) -> None:
        self.on_holdings(node, holdings(node, last, *keys, content=content), 0.0)


def noted(name: RoundName, rewound_from: int = -1) -> m.RoundInfo:
    return m.RoundInfo(name, 2, skip=Skip(rewound_from))


def test_the_newest_whole_step_of_the_last_round_is_gone_on_from() -> None:
    saves = Blind()
    assert not saves.points.knows_round_from_agents
    saves.hears("a", noted(R1), (R1, 100), (R1, 110))
    assert step_of(saves) is None, "b has the other half"
    assert saves.points.knows_round_from_agents
    saves.hears("b", noted(R1), (R1, 90), (R1, 100))
    choice = saves.points.choose()
    assert (choice.restore, choice.why) == (m.Restore(R1, 100, 2), "")
    assert saves.outbox.orders == [], "nobody is told a watermark of a round that is over"
    saves.begin_round(m.RoundInfo(NEW, 2, restore=choice.restore))
    assert not saves.points.knows_round_from_agents
    assert step_of(saves) == 100, "as before any other restart"


@pytest.mark.parametrize("first", ["a", "b"])
def test_rounds_are_never_mixed_and_the_newest_counts(first: str) -> None:
    """a was in round 2, which had gone on from step 100 of the first; b was not, and has what that
    one had later."""
    saves = Blind()
    of = {"a": (FROM_100, (R1, 90), (R1, 100)), "b": (noted(R1), (R1, 100), (R1, 110))}
    for node in (first, "ba"["ab".index(first)]):
        saves.hears(node, *of[node], content=7)
    assert step_of(saves) == 100
    saves.hears("a", FROM_100, (R1, 100), (R2, 110), content=7)
    assert step_of(saves) == 100, "110 of round 1 is none of round 2"


def test_what_was_noted_of_a_node_that_is_gone_stands() -> None:
    saves = Blind()
    saves.hears("a", FROM_100, (R1, 100), content=7)
    saves.hears("b", noted(R1), (R1, 100), (R1, 110), content=7)
    saves.forget("a", 1.0, gone_because="is dead")
    assert step_of(saves) == 100, "b has the same, and what it has of step 110 never was"


def test_a_step_that_nobody_can_make_whole_is_told() -> None:
    saves = Blind()
    saves.hears("a", noted(R1), (R1, 100))
    why = "step 100 cannot be restored from memory: rank 1 never had a snapshot"
    assert saves.points.choose() == type(saves.points.choose())(None, why)


def test_another_number_of_ranks_is_read_as_it_was() -> None:
    """Four ranks on one node, two of which had a step that the others had not."""
    saves = Blind()
    rows = [(90, (1, 2, 3, 4)), (100, (1, 2, 0, 0))]
    held = tuple(m.Holding(R1, step, 0, 4, row, wanted=False) for step, row in rows)
    saves.on_holdings("a", m.Holdings(None, held, last=m.RoundInfo(R1, 4)), 0.0)
    assert saves.points.choose().restore == m.Restore(R1, 90, 4)


@pytest.mark.parametrize("term", [2, 3])
def test_rounds_of_a_later_clock_are_not_believed(term: int) -> None:
    """What is newer would be taken for older from then on."""
    saves = Blind()
    name = RoundName(term, 5, "x")
    for _ in range(2):
        for node in "ab":
            saves.hears(node, noted(name, rewound_from=50), (name, 100))
    assert step_of(saves) is None
    assert saves.points.rewound_from == -1
    ((text, level),) = saves.outbox.notes
    assert level == "warning"
    assert "was a clock set back?" in text


def test_a_master_that_knows_a_round_believes_nothing_else() -> None:
    saves = Blind()
    saves.begin_round(m.RoundInfo(RoundName(2, 1, "z"), 2))
    for node in "ab":
        saves.hears(node, noted(R1, rewound_from=90), (R1, 100))
    assert (step_of(saves), saves.points.rewound_from) == (None, -1)
    saves = Blind()
    saves.hears("a", noted(R2), (R2, 100), content=7)
    saves.begin_round(m.RoundInfo(R1, 2))  # which living ranks have told of
    assert step_of(saves) is None


def test_training_that_was_taken_back_stays_so() -> None:
    saves = Blind()
    saves.hears("a", noted(R1, rewound_from=90), (R1, 80))
    assert saves.points.rewound_from == 90
    saves.hears("b", noted(R1), (R1, 80))
    assert saves.points.rewound_from == -1, "b has heard that storage says so by itself"
    saves.hears("a", noted(R1, rewound_from=90), (R1, 80))
    assert saves.points.rewound_from == -1


def test_a_step_that_failed_in_the_life_before_may_be_poison_again() -> None:
    """Two rounds of this master that go on from it and fail, as ever."""
    saves = Blind()
    for node in "ab":
        saves.hears(node, noted(R1), (R1, 90), (R1, 100))
    for number in (1, 2):
        fails_soon(saves, RoundName(2, number, "z"), m.Restore(R1, 100, 2))
    assert (step_of(saves), saves.points.rewound_from) == (90, 100)


def test_it_is_written_out_before_its_only_holder_goes() -> None:
    saves = Blind()
    for node in "ab":
        saves.hears(node, noted(R1), (R1, 100))
    saves.nodes_leave(("a",), 1.0)
    assert [type(order).__name__ for _, order in saves.outbox.orders] == ["Persist", "Persist"]
    saves = Blind(at_breakpoint=False)
    for node in "ab":
        saves.hears(node, noted(R1), (R1, 100))
    saves.nodes_leave(("a",), 1.0)
    assert saves.outbox.orders == []
