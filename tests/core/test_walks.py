"""How far an event goes through the master's brain: calls from one of our modules into another.

A reader who wants to know why a round began follows these calls, so their number is kept small."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import pytest

from elasticrun.core import events as fx
from elasticrun.wire import messages as m
from elasticrun.wire.types import Endpoint
from tests.core.by_hand import Master, failure, hello


class Walk(NamedTuple):
    calls: int
    hand_offs: int
    files: int


def walk(what: Callable[[], object]) -> Walk:
    """Calls of the core's functions while `what` runs; generated ones, as of records, left out."""
    calls = hand_offs = 0
    files: set[str] = set()

    def seen(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls, hand_offs
        file = frame.f_code.co_filename
        if event != "call" or "/elasticrun/core/" not in file:
            return
        if frame.f_code.co_name.startswith("<"):  # a comprehension's own frame
            return
        calls += 1
        files.add(file)
        caller = frame.f_back
        while caller is not None and caller.f_code.co_name.startswith("<"):
            caller = caller.f_back
        hand_offs += caller is not None and caller.f_code.co_filename != file

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        what()
    finally:
        sys.setprofile(before)
    return Walk(calls, hand_offs, len(files))


def joined() -> Callable[[], object]:
    """The last Join of two nodes, up to Start."""
    master = Master()
    for session, node in ((1, "a"), (2, "b")):
        master.feed(fx.Attached(session, hello(node)))
    master.hear(1, m.Join(Endpoint("10.0.0.1", 4000)))

    def last() -> None:
        master.hear(2, m.Join(Endpoint("10.0.0.2", 4000)))
        assert any(isinstance(order, m.Start) for order in master.orders(2))

    return last


def failed() -> Callable[[], object]:
    """A rank's death, up to the Stop of the other node."""
    master = Master()
    name = master.running()

    def dies() -> None:
        master.hear(1, m.RanksFailed(name, (failure(0),)))
        assert any(isinstance(order, m.Stop) for order in master.orders(2))

    return dies


def unchanged() -> Callable[[], object]:
    master = Master()
    name = master.running()
    return lambda: master.hear(1, m.Running(name, (11, 12)))


def lost() -> Callable[[], object]:
    """A stream that its node's kernel closed."""
    master = Master()
    master.running()
    return lambda: master.feed(fx.Detached(2, clean=False, silent=False, quiet=0.0))


WALKS = {  # calls, hand-offs, files; to end at (decision 039): 45 hand-offs in 16 files, 35 in 13
    joined: Walk(145, 97, 26),
    failed: Walk(144, 77, 22),
    unchanged: Walk(5, 3, 3),
    lost: Walk(71, 47, 21),
}


@pytest.mark.parametrize("event", WALKS, ids=lambda event: event.__name__)
def test_a_walk_gets_no_longer(event: Callable[[], Callable[[], object]]) -> None:
    found, most = walk(event()), WALKS[event]
    assert found.calls <= most.calls, f"{found}"
    assert found.hand_offs <= most.hand_offs, f"{found}"
    assert found.files <= most.files, f"{found}"
