"""Snapshots of a job of two nodes with a rank each, of which a test says who holds what."""

from __future__ import annotations

import itertools

from msgspec.structs import replace

from elasticrun.core.snapshots.snapshots import Snapshots
from elasticrun.wire import messages as m
from elasticrun.wire.types import Endpoint, RoundName

R1, R2 = RoundName(1, 1, "x"), RoundName(1, 2, "y")
SAVER = {node: Endpoint(node, 7000) for node in "abc"}


class Saves(Snapshots):
    """Two nodes of one rank each, of which the test says who holds what."""

    def __init__(self, *, at_breakpoint: bool = True, limit: float = 60.0) -> None:
        names = itertools.count(1)
        super().__init__(m.SaveSpec(at_breakpoint, limit), lambda: f"try{next(names)}")
        self.begin_round(m.RoundInfo(R1, 2))

    def holds(
        self,
        node: str,
        *steps: int,
        now: float = 0.0,
        wanted: int = -1,
        name: RoundName = R1,
        content: int = 0,
        saver: bool = True,
    ) -> None:
        rank = "ab".index(node)
        own = content or rank + 1
        held = tuple(m.Holding(name, s, rank, 2, (own,), s == wanted) for s in steps)
        self.on_holdings(node, m.Holdings(SAVER[node] if saver else None, held), now)

    def both(self, *steps: int, now: float = 0.0, wanted: int = -1, content: int = 0) -> None:
        for node in "ab":
            self.holds(node, *steps, now=now, wanted=wanted, content=content)

    def taken(self) -> list[tuple[str, str]]:
        """The orders since the last call, as (nodes, name of the order)."""
        orders, self.outbox.orders = self.outbox.orders, []
        return [("".join(nodes), type(order).__name__) for nodes, order in orders]

    def last(self) -> m.Order:
        return self.outbox.orders[-1][1]

    def does(self, name: str, now: float = 1.0, *, ok: bool = True, marks: bool = True) -> None:
        """Both write their parts, and a the marker."""
        for node in "ab":
            self.persisted(node, m.Persisted(name, True, False, "", 10, 0.1), now)
        if marks:
            why = "" if ok else "the disk is full"
            self.persisted("a", m.Persisted(name, ok, True, why, 0, 0.1), now)

    def says(self) -> str:
        news, self.outbox.notes = self.outbox.notes, []
        return "; ".join(text for text, _ in news)


def fails_soon(
    saves: Snapshots, name: RoundName, restore: m.Restore, reached: int | None = None
) -> None:
    """A round that goes on from there, does a step (or comes to `reached`), and fails by itself."""
    saves.begin_round(m.RoundInfo(name, 2, restore=restore))
    report = saves.points.reports["a"]
    went_on = m.WentOn(name, restore.step + 1 if reached is None else reached)
    saves.on_holdings("a", replace(report, went_on=went_on), 0.0)
    saves.points.failed_by_itself()


def holding(name: RoundName, step: int, rank: int = 1) -> m.Holding:
    return m.Holding(name, step, rank, 2, (rank + 1,), wanted=False)


def answer(saves: Snapshots, node: str, asked: m.WhereIs) -> m.Holder:
    """What a node that asks is told at once."""
    saves.outbox.orders.clear()
    saves.points.locate(node, asked)
    ((nodes, order),) = saves.outbox.orders
    assert nodes == (node,)
    assert isinstance(order, m.Holder)
    return order


def step_of(saves: Snapshots) -> int | None:
    restore = saves.points.choose().restore
    return None if restore is None else restore.step
