"""The console copy of what ranks print: one thread that may block, and a queue that may not grow.

Ctrl-S, tmux's copy mode or `| less` stop whoever writes to a terminal. Here that is a thread of its
own, which nothing waits for: ranks write to their files, the agent beats, and lines that the
terminal does not take are dropped and counted (DROP-IN 8). A console that is merely slow loses
nothing, because the reader of the files waits for it as long as it moves.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Final

from elasticrun.config import CONSOLE_QUEUE_LINES

QUEUE_BYTES: Final = 8 * 1024 * 1024
"""The queue holds no more than this either, however long the lines are."""

FROZEN_AFTER: Final = 5.0
"""Seconds without a byte taken after which a console is frozen and lines are dropped instead of
waited with. Raise it and a pager may be left alone longer; the filtered copies wait as well."""

CHUNK_BYTES: Final = 4096
"""One write holds whole lines of no more than this (unless a single line is longer): a pipe takes
so much in one piece, so lines of ranks and of others that share the terminal do not mix."""


class ConsoleWriter:
    """Writes lines to a file descriptor from a thread; `put` is for one other thread."""

    def __init__(
        self,
        fd: int,
        *,
        capacity: int = CONSOLE_QUEUE_LINES,
        patience: float = FROZEN_AFTER,
    ) -> None:
        self._fd = fd
        self._capacity = capacity
        self._patience = patience
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._progress = time.monotonic()
        self._writing = False
        self._gone = False
        self._closing = False
        self._untold = 0
        self._dropped = 0
        self._thread: threading.Thread | None = None

    @property
    def dropped(self) -> int:
        """Lines that were never written to the console, so far."""
        with self._changed:
            return self._dropped

    @property
    def written_at(self) -> float:
        """When the console last took something, on the monotonic clock."""
        with self._changed:
            return self._progress

    def put(self, lines: Iterable[bytes]) -> None:
        """Queue whole lines. Waits while the queue is full and the console moves, drops the line
        when it has not moved for `patience` seconds."""
        with self._changed:
            for line in lines:
                if self._closing or self._gone or not self._await_room(len(line)):
                    self._dropped += 1
                    self._untold += not self._gone
                else:
                    self._push(line)

    def close(self, timeout: float) -> int:
        """Write what is queued, giving up when the console takes nothing for `timeout` seconds.

        Returns how many lines were dropped in all. Calling it again changes nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            end = time.monotonic() + timeout
            while (self._lines or self._writing) and not self._gone:
                end = max(end, self._progress + timeout)
                if (rest := end - time.monotonic()) <= 0:
                    break
                self._changed.wait(rest)
            self._dropped += len(self._lines)
            self._lines.clear()
            self._bytes = 0
            return self._dropped

    # ---------------------------------------------------------------- the reader's side

    def _await_room(self, size: int) -> bool:
        while len(self._lines) >= self._capacity or (
            self._lines and self._bytes + size > QUEUE_BYTES
        ):
            rest = self._progress + self._patience - time.monotonic()
            if rest <= 0 or self._gone or self._closing:
                return False
            self._changed.wait(rest)
        return True

    def _push(self, line: bytes) -> None:
        if not self._lines and not self._writing:
            self._progress = time.monotonic()  # an idle console is not a frozen one
        if self._untold:
            notice = b"elasticrun: %d lines were not shown: the console was frozen\n" % self._untold
            self._untold = 0
            self._lines.append(notice)
            self._bytes += len(notice)
        self._lines.append(line)
        self._bytes += len(line)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name=f"elasticrun-console-{self._fd}", daemon=True
            )
            self._thread.start()
        self._changed.notify_all()

    # ---------------------------------------------------------------- the writer's side

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                while not self._lines:
                    if self._closing:
                        return
                    self._changed.wait()
                chunk = self._take()
                self._writing = True
                self._changed.notify_all()
            try:
                self._write(chunk)
            except OSError:  # nobody reads it any more; the job does not depend on it
                with self._changed:
                    self._gone, self._writing = True, False
                    self._dropped += len(self._lines)
                    self._lines.clear()
                    self._bytes = 0
                    self._changed.notify_all()
                return

    def _take(self) -> bytes:
        """Whole lines of one write; called with the lock held and a line in the queue."""
        chunk = [self._lines.popleft()]
        size = len(chunk[0])
        while self._lines and size + len(self._lines[0]) <= CHUNK_BYTES:
            chunk.append(self._lines.popleft())
            size += len(chunk[-1])
        self._bytes -= size
        return b"".join(chunk)

    def _write(self, chunk: bytes) -> None:
        rest = memoryview(chunk)
        while rest:
            try:
                taken = os.write(self._fd, rest)
            except BlockingIOError:  # somebody made the shared terminal non-blocking
                poller = select.poll()
                poller.register(self._fd, select.POLLOUT)
                poller.poll()
                continue
            rest = rest[taken:]
            with self._changed:
                self._progress = time.monotonic()
