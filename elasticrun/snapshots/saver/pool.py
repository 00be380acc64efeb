"""Runs slow work outside the saver's event loop, with a limited number of threads for each kind.

A work item runs in a daemon thread and does not access the loop's state; its result is passed to a
function that the loop calls. No thread is ever joined: one that hangs in a file system is
abandoned.
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
"""Maximum number of waiting items of one pool; there are a few for each local rank."""

Post = Callable[[Callable[[], None]], None]
"""Makes the loop call a function; callable from any thread."""


class QueueFull(Exception):
    """Too many items are waiting."""


@dataclass(eq=False)
class WorkItem(Generic[T]):
    """Work for a pool. A thread calls `work` with this item's `stop`; then the loop calls `done`
    with the result, or with that of `failed(error)`, which the thread calls."""

    work: Callable[[threading.Event], T]
    failed: Callable[[BaseException], T]
    done: Callable[[T], None]
    urgent: bool = True
    name: Hashable = None
    stop: threading.Event = field(default_factory=threading.Event)
    began: float | None = None  # when its thread started, monotonic; None: it waits


class WorkerPool:
    """Runs one kind of work in at most `width` threads. Used by the loop's thread only."""

    def __init__(self, name: str, width: int, post: Post) -> None:
        self._name = name
        self._width = width
        self._post = post
        self._running = 0
        self._waiting: list[WorkItem[Any]] = []

    def add(self, piece: WorkItem[Any], *, first: bool = False) -> None:
        """Queue an item; with `first`, at the front. Urgent items start before all others. Replaces
        a waiting item of the same name, if it has one. Raises QueueFull."""
        if piece.name is not None:
            self.drop(piece.name)
        if len(self._waiting) >= MAX_WAITING:
            raise QueueFull(f"{MAX_WAITING} work items are waiting already")
        self._waiting.insert(0 if first else len(self._waiting), piece)
        self._start_next()

    def drop(self, name: Hashable) -> bool:
        """Remove the waiting items of this name, without callbacks; returns whether there were
        any."""
        before = len(self._waiting)
        self._waiting = [piece for piece in self._waiting if piece.name != name]
        return len(self._waiting) < before

    def _start_next(self) -> None:
        while self._waiting and self._running < self._width:
            piece = next((p for p in self._waiting if p.urgent), self._waiting[0])
            self._waiting.remove(piece)
            self._running += 1
            piece.began = time.monotonic()
            try:
                start_thread(self._work, self._name, (piece,))
            except NoThread as error:
                self._post(partial(self._item_ended, piece, piece.failed(error)))

    def _work(self, piece: WorkItem[Any]) -> None:
        try:
            result = piece.work(piece.stop)
        except BaseException as error:  # reported to whoever waits for it
            result = piece.failed(error)
        self._post(lambda: self._item_ended(piece, result))

    def _item_ended(self, piece: WorkItem[Any], result: Any) -> None:
        self._running -= 1
        try:
            piece.done(result)
        finally:
            self._start_next()


class Inbox:
    """A queue of functions for the loop to call, filled by other threads; `wake` wakes the loop."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = wake

    def post(self, call: Callable[[], None]) -> None:
        self._calls.put(call)
        self._wake()

    def drain(self) -> list[Callable[[], None]]:
        """Take all functions that are queued now."""
        return [self._calls.get_nowait() for _ in range(self._calls.qsize())]
