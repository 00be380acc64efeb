"""Attempts by hand: what holds up what, with threads that wait where storage would."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from elasticrun.snapshots.saver import attempts as module, pool, work
from elasticrun.snapshots.saver.attempts import Attempts
from elasticrun.snapshots.saver.pool import Inbox, WorkerPool
from elasticrun.snapshots.saver.work import Outcome
from elasticrun.wire.snapshots import FromSaver, PartsDone, PersistParts, Remark
from tests.harness import LIMIT
from tests.snapshots.saver.play import part, persist


class Storage:
    """Each kind of work waits until the test lets it go on."""

    def __init__(self, monkeypatch) -> None:
        self.gates: dict[str, threading.Event] = {}
        self.began: dict[str, threading.Event] = {}
        for kind in ("write_parts", "remove_attempt", "remove_unfinished", "sweep"):
            monkeypatch.setattr(work, kind, self._stand_in(kind))

    def of(self, kind: str, attempt: str) -> tuple[threading.Event, threading.Event]:
        """That it has begun, and what it waits for."""
        name = f"{kind} {attempt}"
        began = self.began.setdefault(name, threading.Event())
        return began, self.gates.setdefault(name, threading.Event())

    def _stand_in(self, kind: str) -> Callable[..., Outcome]:
        def act(*args: Any) -> Outcome:
            (order,) = [arg for arg in args if isinstance(arg, PersistParts)]
            began, gate = self.of(kind, order.attempt)
            began.set()
            assert gate.wait(LIMIT)
            return Outcome()

        return act

    def let_all_go(self) -> None:
        for gate in self.gates.values():
            gate.set()


class Play:
    """A saver's loop, driven by the test, on a clock that the test sets."""

    def __init__(self, monkeypatch) -> None:
        self.now = 1000.0
        for one in (module, pool):
            monkeypatch.setattr(one, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.woken = threading.Semaphore(0)
        self.inbox = Inbox(self.woken.release)
        self.said: list[FromSaver] = []
        both = [WorkerPool(name, 1, self.inbox.post) for name in ("disk", "puts")]
        self.attempts = Attempts("secret", {}, self.said.append, *both)
        self.storage = Storage(monkeypatch)

    def order(self, attempt: str) -> None:
        """The agent orders an attempt to write one part."""
        self.attempts.start(persist("/x", part(), attempt=attempt))

    def writes(self, attempt: str) -> None:
        """It is ordered, and writes."""
        self.order(attempt)
        self.begins("write_parts", attempt)

    def begins(self, kind: str, attempt: str) -> None:
        """Wait until this work has begun."""
        began, _ = self.storage.of(kind, attempt)
        assert began.wait(LIMIT), f"{kind} of {attempt} does not begin"

    def ends(self, kind: str, attempt: str) -> None:
        """Let it end, and hear of it."""
        self.storage.of(kind, attempt)[1].set()
        assert self.woken.acquire(timeout=LIMIT)
        for call in self.inbox.drain():
            call()

    def hung(self) -> str:
        """Whether the saver would end now, and why; the loop looks when it said that it would."""
        due = self.attempts.next_deadline()
        if due is None or due > self.now or not self.attempts.has_hung(self.now):
            return ""
        last = self.said[-1]
        assert isinstance(last, Remark)
        return last.text


@pytest.fixture
def play(monkeypatch) -> Iterator[Play]:
    made = Play(monkeypatch)
    yield made
    for kind in ("write_parts", "remove_attempt", "remove_unfinished", "sweep"):
        for attempt in ("a1", "a2"):
            made.storage.of(kind, attempt)
    made.storage.let_all_go()


def begin_behind_a_sweep(play: Play) -> None:
    """The first attempt was given up, and old checkpoints are being removed; the second waits."""
    play.writes("a1")
    play.attempts.give_up("a1", play.now)
    play.ends("write_parts", "a1")
    play.begins("remove_attempt", "a1")
    play.ends("remove_attempt", "a1")
    play.begins("remove_unfinished", "a1")
    play.order("a2")


def test_what_an_attempt_has_left_goes_before_the_next_one_writes(play: Play) -> None:
    """The thread of the first comes back late, when the second waits already: it needs the room."""
    play.writes("a1")
    play.attempts.give_up("a1", play.now)
    play.order("a2")
    play.ends("write_parts", "a1")
    play.begins("remove_attempt", "a1")
    play.now += module.CLEAN_LIMIT - 1.0
    assert play.hung() == ""
    play.ends("remove_attempt", "a1")
    play.begins("write_parts", "a2")
    play.now += 10_000.0
    assert play.hung() == ""
    play.ends("write_parts", "a2")
    assert any(isinstance(one, PartsDone) and one.ok for one in play.said)


def test_work_is_not_late_while_it_waits(play: Play) -> None:
    """Behind a sweep, which takes long: else a saver that works would be ended."""
    begin_behind_a_sweep(play)
    play.attempts.give_up("a2", play.now)
    play.now += module.CLEAN_LIMIT + 1.0
    assert play.hung() == ""
    play.ends("remove_unfinished", "a1")
    play.begins("remove_attempt", "a2")
    play.now += module.CLEAN_LIMIT
    assert "did not finish removing the files of an attempt within 60 s" in play.hung()


def test_a_thread_that_does_not_come_back_ends_the_saver(play: Play) -> None:
    play.writes("a1")
    play.now += 10_000.0
    assert play.hung() == "", "how long it may take is the agent's word"
    play.attempts.give_up("a1", play.now)
    play.now += module.STOP_LIMIT
    assert "did not stop writing an attempt within 10 s" in play.hung()


def test_a_sweep_that_hangs_does_not_hold_up_the_next_attempts_for_good(play: Play) -> None:
    begin_behind_a_sweep(play)
    play.now += module.SWEEP_LIMIT
    assert "did not finish removing old checkpoints within 600 s" in play.hung()
