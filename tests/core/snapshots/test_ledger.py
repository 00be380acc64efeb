"""The books of who holds what: as the definition says, whatever is said and lost in what order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from elasticrun.core.snapshots.checkpoints import divide, format_size
from elasticrun.core.snapshots.ledger import Ledger, in_spans
from elasticrun.wire.messages import Holding
from elasticrun.wire.types import RoundName
from tests.further import examples

NAME = RoundName(1, 3, "n")
WORLD = 6
NODES = {"a": 0, "b": 2, "c": 4}  # node -> its first rank; two ranks each


def held(node: str, step: int, *contents: int, wanted: bool = False, world: int = WORLD) -> Holding:
    return Holding(NAME, step, NODES[node], world, contents, wanted)


def ddp(*nodes: str, step: int = 100) -> Ledger:
    ledger = Ledger(NAME, WORLD)
    for node in nodes:
        ledger.update(node, [held(node, step, 7, 7)])
    return ledger


def sharded(*nodes: str, step: int = 100) -> Ledger:
    ledger = Ledger(NAME, WORLD)
    for node in nodes:
        first = NODES[node]
        ledger.update(node, [held(node, step, first + 1, first + 2)])
    return ledger


class Definition:
    """What there is, written out: nothing is kept but what was said."""

    def __init__(self) -> None:
        self.heard_of: set[int] = set()  # ranks
        self.now: dict[str, list[Holding]] = {}

    def hear(self, node: str, said: list[Holding]) -> None:
        self.now[node] = said
        self.heard_of |= {rank for one in said for rank in self.contents(one)}

    def contents(self, one: Holding) -> dict[int, int]:
        return {rank: c for rank, c in enumerate(one.contents, one.first_rank) if c}

    def held(self, step: int) -> dict[int, int]:
        """Rank -> content; of their own nodes."""
        said = [one for said in self.now.values() for one in said]
        holdings = [one for one in said if one.step == step and not one.replica]
        return {rank: c for one in holdings for rank, c in self.contents(one).items()}

    def places(self, step: int) -> dict[int, set[str]]:
        """Content -> nodes."""
        found: dict[int, set[str]] = {}
        for node, said in self.now.items():
            ranks: dict[int, int] = {}
            for one in sorted(said, key=lambda one: one.replica):
                if one.step == step:
                    ranks = self.contents(one) | ranks
            for content in ranks.values():
                found.setdefault(content, set()).add(node)
        return found


@st.composite
def stories(draw: Any) -> list[tuple[str, list[Holding]]]:
    """Who says what, in order; some say that they have nothing any more."""
    story = []
    for _ in range(draw(st.integers(1, 12))):
        node = draw(st.sampled_from(sorted(NODES)))
        steps = draw(st.lists(st.sampled_from([100, 110, 120]), unique=True, max_size=3))
        contents = st.integers(0, 3)
        said = [held(node, step, draw(contents), draw(contents)) for step in sorted(steps)]
        for step in draw(st.lists(st.sampled_from([100, 110]), unique=True, max_size=2)):
            of = draw(st.sampled_from(sorted(NODES)))
            said.append(replace(held(of, step, draw(contents), draw(contents)), replica=True))
        story.append((node, said))
    return story


@pytest.mark.slow
@given(stories())
@settings(max_examples=examples(40), deadline=None)
def test_who_has_what_is_what_was_said_last(story: list[tuple[str, list[Holding]]]) -> None:
    ledger, truth = Ledger(NAME, WORLD), Definition()
    for node, said in story:
        ledger.update(node, said)
        truth.hear(node, said)
        for step in (100, 110, 120):
            snap = ledger.snaps.get(step)
            have = set(snap.holders) if snap else set()
            places = truth.places(step)
            assert have == set(places)
            if snap is None:
                continue
            needed = set(snap.expected.values())
            assert snap.missing == len(needed - have)
            lone = {content for content in needed & have if len(places[content]) == 1}
            assert snap.lone == len(lone)
            assert {c for row in snap.sole_copies().values() for c in row} == lone
            assert set(snap.need) == needed
            assert snap.ranks == len(truth.held(step))
            assert set(snap.expected) == truth.heard_of
            whole = truth.heard_of == set(range(WORLD)) and needed <= have
            assert ledger.is_whole(step) == whole


def test_a_sharded_state_does_not_outlive_one_node() -> None:
    ledger = sharded("a", "b", "c")
    assert ledger.is_whole(100)
    ledger.update("b", ())
    assert not ledger.is_whole(100)
    assert ledger.why_not_whole(100) == "node b held the only copy of ranks 2-3"
    ledger.update("c", ())
    assert "ranks 2-3, and 1 more nodes that of others" in ledger.why_not_whole(100)


def test_a_layout_that_changes_counts_from_its_step_on() -> None:
    """An optimizer makes its state at the first step: shards of two layouts are not combined."""
    ledger = ddp("a", "b", "c")
    ledger.update("a", [held("a", 100, 7, 7), held("a", 110, 8, 8)])
    assert not ledger.is_whole(110), "the others are expected to have what they had"
    ledger.update("b", [held("b", 100, 7, 7), held("b", 110, 8, 8)])
    ledger.update("c", [held("c", 110, 8, 8)])
    assert ledger.is_whole(110)
    assert ledger.is_whole(100)
    ledger.update("a", [held("a", 110, 8, 8)])
    ledger.update("b", ())
    assert ledger.is_whole(110)
    assert not ledger.is_whole(100)


@pytest.mark.parametrize(
    "one",
    [
        held("a", 100, 7, 7, world=8),
        Holding(RoundName(1, 3, "x"), 100, 0, WORLD, (7, 7), wanted=False),
        Holding(RoundName(2, 3, "n"), 100, 0, WORLD, (7, 7), wanted=False),
    ],
    ids=["world", "nonce", "term"],
)
def test_what_is_of_another_round_does_not_count(one: Holding) -> None:
    ledger = Ledger(NAME, WORLD)
    ledger.update("a", [one])
    assert ledger.steps() == []


def test_steps_later_than_a_restore_do_not_come_back() -> None:
    ledger = ddp("a", "b", "c")
    ledger.update("a", [held("a", 100, 7, 7), held("a", 110, 7, 7)])
    ledger.end_at(100)
    assert ledger.steps() == [100]
    ledger.update("b", [held("b", 110, 7, 7)])
    assert ledger.steps() == [100]
    assert ledger.is_whole(100)


def test_a_bad_shard_counts_as_absent_for_good() -> None:
    ledger = sharded("a", "b", "c")
    assert ledger.spoil("b", 100, 3)
    assert not ledger.spoil("b", 100, 3), "it is known"
    assert not ledger.spoil("b", 100, 0), "it is not there"
    assert ledger.why_not_whole(100) == "node b held the only copy of rank 3"
    ledger.update("b", [held("b", 100, 3, 4, wanted=True)])
    assert not ledger.is_whole(100)
    copies = ddp("a", "b")
    copies.update("c", [held("c", 100, 7, 7)])
    copies.spoil("c", 100, 4)
    assert copies.is_whole(100), "others have the same"
    assert ("c", 4) not in copies.find_places(100, 4)


def test_a_shard_is_asked_of_its_own_rank_first() -> None:
    ledger = ddp("a", "b", "c")
    assert ledger.find_places(100, 3)[0] == ("b", 3)
    ledger.update("b", ())
    assert ledger.find_places(100, 3)[0] == ("a", 0)
    assert ledger.find_places(110, 3) == []


def test_one_rank_of_each_content_writes_what_is_shared() -> None:
    parts = divide(ddp("a", "b"), 100)
    assert {node: part.ranks for node, part in parts.items()} == {"a": (0, 1), "b": (2, 3)}
    assert {node: part.shared for node, part in parts.items()} == {"a": (0,), "b": ()}
    parts = divide(sharded("a", "b", "c"), 100)
    assert [part.shared for part in parts.values()] == [(0, 1), (2, 3), (4, 5)]
    twice = ddp("a")
    twice.update("z", [Holding(NAME, 100, 0, WORLD, (7, 7), wanted=False)])
    parts = divide(twice, 100)
    assert [(node, part.ranks) for node, part in parts.items()] == [("a", (0, 1))]


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([3], "rank 3"),
        ([1, 2, 3], "ranks 1-3"),
        ([5, 1, 2], "ranks 1-2, 5"),
        (range(0, 20, 2), "ranks 0, 2, 4, 6 and more"),
    ],
    ids=str,
)
def test_ranks_in_words(ranks: Any, said: str) -> None:
    assert in_spans(ranks) == said


def test_sizes_in_words() -> None:
    sizes = (12, 5 << 10, 300 << 20, int(1.25 * 2**30))
    assert [format_size(size) for size in sizes] == ["12 B", "5 KiB", "300 MiB", "1.25 GiB"]
