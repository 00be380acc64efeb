"""The step that all ranks save before a node leaves."""

from __future__ import annotations

from elasticrun.core.snapshots.snapshots import MAX_TRIES, Departures
from elasticrun.core.snapshots.types import Outbox
from elasticrun.wire import messages as m
from elasticrun.wire.types import RoundName

ROUND, OTHER = RoundName(1, 1, "aa"), RoundName(1, 2, "bb")


def departing(step: int, margin: int = 2, asked: int = -1) -> m.Departing:
    return m.Departing(ROUND, "received SIGTERM", 15, step, margin, asked)


ALL = ("a", "b", "c", "d")


def begun() -> Departures:
    made = Departures(Outbox())
    made.begin_round(ROUND)
    return made


def told(departures: Departures) -> list[int]:
    """The steps of the orders since the last call; those that are given up are negative."""
    outbox = departures._outbox
    orders, outbox.orders = outbox.orders, []
    assert all(nodes == ALL for nodes, _ in orders)
    steps = []
    for _, one in orders:
        assert isinstance(one, m.SaveAt | m.PersistOver)
        steps.append(one.step if isinstance(one, m.SaveAt) else -one.step)
    return steps


def test_several_nodes_are_given_one_step() -> None:
    departures = begun()
    departures.departing("a", departing(10), ALL)
    departures.departing("b", departing(11, margin=40), ALL)
    departures.departing("a", departing(10), ALL)
    assert told(departures) == [12]
    assert departures.order == m.SaveAt(ROUND, 12, "node a and 1 node more must leave")
    assert departures.requested == (ROUND, 12)


def test_a_missed_step_is_followed_by_one_twice_as_far() -> None:
    departures = begun()
    departures.departing("a", departing(10), ALL)
    for node in ("b", "c", "d"):
        departures.missed(node, m.Missed(ROUND, 12, 15), ALL)
    assert told(departures) == [12, 19, -12]
    departures.missed("b", m.Missed(ROUND, 19, 19), ALL)
    assert told(departures) == [27, -19]


def test_there_is_an_end_to_that() -> None:
    departures = begun()
    departures.departing("a", departing(10), ALL)
    for _ in range(MAX_TRIES):
        last = departures.requested
        departures.missed("b", m.Missed(ROUND, last[1], last[1]), ALL)
    assert told(departures)[-1] < 0
    assert departures.order is None
    assert departures.nodes_leave(("a",)) is False


def test_a_node_that_departs_after_the_step_was_saved_is_given_another() -> None:
    departures = begun()
    departures.departing("a", departing(10), ALL)
    departures.saved(m.Restore(ROUND, 11, 2))
    assert departures.order is not None
    departures.saved(m.Restore(ROUND, 12, 2))
    assert departures.order is None
    departures.departing("b", departing(14), ALL)
    assert told(departures) == [12, 16]


def test_who_goes_with_what_is_not_saved() -> None:
    departures = begun()
    departures.departing("a", departing(10), ALL)
    departures.departing("b", departing(10), ALL)
    assert departures.nodes_leave(("c",)) is None
    assert departures.nodes_leave(("a", "c")) is True
    departures.saved(m.Restore(ROUND, 12, 2))
    assert departures.nodes_leave(("b",)) is False


def test_a_new_round_knows_nothing_of_it() -> None:
    departures = begun()
    departures.departing("a", departing(10), ALL)
    departures.begin_round(OTHER)
    departures.departing("a", departing(10), ALL)
    departures.missed("a", m.Missed(ROUND, 12, 15), ALL)
    assert departures.order is None
    assert departures.nodes_leave(("a",)) is None
    assert departures.status() == ""
