"""Work that takes long, kept off the saver's loop: so many pieces of a kind at a time.

A piece of work runs in a daemon thread of its own and touches nothing of the loop's; what came of
it is a function that the loop calls. Nobody waits for a thread: one that hangs in a file system is
left there.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Generic, TypeVar

from elasticrun.host.system.sandbox import NoThread, start_thread

T = TypeVar("T")

MAX_WAITING: Final = 10_000
"""Pieces of work of one kind that wait for their turn; at most a few for each local rank."""

Post = Callable[[Callable[[], None]], None]
"""Has the loop call something, from any thread."""


class Full(Exception):
    """Too much waits already; a sentence."""


@dataclass(eq=False)
class WorkItem(Generic[T]):
    """Some work. `work` is called in a thread with this piece's `stop`; then `done` in the loop,
    with the result, or with `failed(error)` in its place."""

    work: Callable[[threading.Event], T]
    failed: Callable[[BaseException], T]
    done: Callable[[T], None]
    urgent: bool = True
    name: Hashable = None
    stop: threading.Event = field(default_factory=threading.Event)
    began: float | None = None  # when its thread began, by the monotonic clock; None: it waits


class WorkerPool:
    """One kind of work. Belongs to the loop's thread."""

    def __init__(self, name: str, width: int, post: Post) -> None:
        self._name = name
        self._width = width
        self._post = post
        self._running = 0
        self._waiting: list[WorkItem[Any]] = []

    def add(self, piece: WorkItem[Any], *, first: bool = False) -> None:
        """Do it when its turn comes: urgent ones first, and each kind in order, but for one that is
        to be `first`. A waiting piece of the same name (but None) is dropped. Full."""
        if piece.name is not None:
            self.drop(piece.name)
        if len(self._waiting) >= MAX_WAITING:
            raise Full(f"{MAX_WAITING} pieces of work wait already")
        self._waiting.insert(0 if first else len(self._waiting), piece)
        self._go_on()

    def drop(self, name: Hashable) -> bool:
        """Forget the waiting pieces of this name; nothing is called for them. Whether there were
        any."""
        before = len(self._waiting)
        self._waiting = [piece for piece in self._waiting if piece.name != name]
        return len(self._waiting) < before

    def _go_on(self) -> None:
        while self._waiting and self._running < self._width:
            piece = next((p for p in self._waiting if p.urgent), self._waiting[0])
            self._waiting.remove(piece)
            self._running += 1
            piece.began = time.monotonic()
            try:
                start_thread(self._work, self._name, (piece,))
            except NoThread as error:
                self._post(partial(self._over, piece, piece.failed(error)))

    def _work(self, piece: WorkItem[Any]) -> None:
        try:
            result = piece.work(piece.stop)
        except BaseException as error:  # a reason for whoever waits for it
            result = piece.failed(error)
        self._post(lambda: self._over(piece, result))

    def _over(self, piece: WorkItem[Any], result: Any) -> None:
        self._running -= 1
        try:
            piece.done(result)
        finally:
            self._go_on()


class Inbox:
    """Functions that other threads want the loop to call; `wake` makes it look."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = wake

    def post(self, call: Callable[[], None]) -> None:
        self._calls.put(call)
        self._wake()

    def take(self) -> list[Callable[[], None]]:
        """What there is now."""
        return [self._calls.get_nowait() for _ in range(self._calls.qsize())]
