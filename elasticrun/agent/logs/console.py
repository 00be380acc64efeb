"""The console copy of what ranks print: one thread that may block, and a queue that may not grow.

Ctrl-S, tmux's copy mode or `| less` stop whoever writes to a terminal. Here that is a thread of its
own, which nothing waits for: ranks write to their files, the agent beats, and lines that the
terminal does not take are dropped and counted, by file. A console that is merely slow loses
nothing, because the reader of the files waits for it as long as somebody reads.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import select
import stat
import termios
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from enum import Enum
from typing import Final, Protocol

from elasticrun.config import CONSOLE_QUEUE_LINES
from elasticrun.host.log import columns_of, cut_to, open_line

QUEUE_BYTES: Final = 8 * 1024 * 1024
"""The queue holds no more than this either, however long the lines are."""

FROZEN_AFTER: Final = 5.0
"""Seconds without a byte taken after which a console is frozen and lines are dropped instead of
waited with. Raise it and a pager may be left alone longer; the filtered copies wait as well."""

LOOKS: Final = 8
"""How often within that time the kernel is asked whether somebody has read: others may write to the
same terminal, which hides a reader from a single look."""

CHUNK_BYTES: Final = 4096
"""One write holds whole lines of no more than this (unless a single line is longer): a pipe takes
so much in one piece, so lines of ranks and of others that share the terminal do not mix."""


class Text(Enum):
    """What a text in the queue is."""

    LINE = "line"  # with a line break
    PARTIAL = "partial"  # the beginning of a line, of which more may come
    BAR = "bar"  # a state of a progress bar, in whose place the next one is written


class Source(Protocol):
    """The file that lines come from, and what was written before each of them."""

    path: str
    prefix: bytes

    @property
    def owner(self) -> object:
        """Whose line it is: what comes next from the same one goes on with it, or replaces it."""


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
        self._lines: deque[tuple[bytes, Source | None, Text]] = deque()
        self._open_line = open_line(fd)
        self._bytes = 0
        self._changed = threading.Condition()
        self._progress = time.monotonic()
        self._unread = 0  # bytes that the kernel held for the reader when we looked last
        self._writing = False
        self._held = False
        self._awaited = False
        self._gone = False
        self._closing = False
        self._over_at: float | None = None
        self._untold = 0
        self._dropped = 0
        self._lost: Counter[str] = Counter()
        self._thread: threading.Thread | None = None

    @property
    def is_terminal(self) -> bool:
        """Whether people read it, and no program."""
        return os.isatty(self._fd)

    @property
    def dropped(self) -> int:
        """Lines that were never written to the console, so far."""
        with self._changed:
            return self._dropped

    @property
    def lost(self) -> dict[str, int]:
        """Bytes that were never shown, by the path of the file that has them."""
        with self._changed:
            return dict(self._lost)

    @property
    def is_awaited(self) -> bool:
        """Whether a `put` waits for room, as long as its patience lasts."""
        with self._changed:
            return self._awaited

    @property
    def is_over(self) -> bool:
        """Nothing more is shown: nobody reads it any more, or its time is up."""
        with self._changed:
            return self._gone or self._is_late()

    @property
    def why_over(self) -> str:
        """Why something was not shown, in words for people."""
        if self._gone:
            return "the console was closed"
        if self._over_at is not None:
            return "the time to end was up"
        return f"nobody read the console for {self._patience:g} s"

    def start(self) -> None:
        """Start the thread. RuntimeError where no thread can be started."""
        if self._thread is None:
            thread = threading.Thread(
                target=self._run, name=f"elasticrun-console-{self._fd}", daemon=True
            )
            thread.start()
            self._thread = thread

    def put(self, lines: Iterable[bytes], source: Source | None = None) -> None:
        """Queue whole lines. Waits while the queue is full and somebody reads, drops the line
        when nobody has read for `patience` seconds."""
        with self._changed:
            for line in lines:
                if self._closing or self._gone or not self._await_room(len(line)):
                    self._drop(line, source)
                    self._untold += not self._gone
                else:
                    self._push(line, source)

    def show(self, text: bytes, source: Source, kind: Text) -> None:
        """Queue the beginning of a line, or a state of a progress bar. It is left out where the
        console does not keep up, or nobody reads: the whole line comes later."""
        with self._changed:
            if self._lines and self._lines[-1][1:] == (source, kind):
                self._bytes -= len(self._lines.pop()[0])
            if len(self._lines) < self._capacity and not (self._closing or self.is_over):
                self._push(text, source, kind)

    def lose(self, path: str, count: int) -> None:
        """So many bytes of a file are not even read."""
        with self._changed:
            self._lost[path] += count

    def hold(self, held: bool) -> None:
        """Write nothing while another console of the same terminal has precedence."""
        with self._changed:
            self._held = held
            self._progress = time.monotonic()
            self._changed.notify_all()

    def hurry(self, until: float) -> None:
        """What is not shown then, on the monotonic clock, is dropped."""
        with self._changed:
            self._over_at = until
            self._changed.notify_all()

    def close(self, timeout: float) -> int:
        """Write what is queued, giving up when nobody reads for `timeout` seconds.

        Returns how many lines were dropped in all. Calling it again changes nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            began = time.monotonic()
            while (self._lines or self._writing) and not self._gone:
                if not self._wait_for_reader(timeout, began):
                    break
            self._drop_queue()
            self._changed.notify_all()
            return self._dropped

    # ---------------------------------------------------------------- the reader's side

    def _await_room(self, size: int) -> bool:
        while len(self._lines) >= self._capacity or (
            self._lines and self._bytes + size > QUEUE_BYTES
        ):
            if self._gone or self._closing:
                return False
            self._awaited = True
            read_on = self._wait_for_reader(self._patience, 0.0)
            self._awaited = False
            if not read_on:
                return False
        return not self._is_late()

    def _wait_for_reader(self, patience: float, since: float) -> bool:
        """Wait for a change; false if nobody has read for `patience` seconds, or the time is up."""
        self._look()
        now = time.monotonic()
        rest = patience if self._held else max(self._progress, since) + patience - now
        if self._over_at is not None:
            rest = min(rest, self._over_at - now)
        if rest <= 0:
            return False
        self._changed.wait(min(rest, patience / LOOKS))
        return True

    def _look(self) -> None:
        """See whether the reader has taken something since the last look, be it less than a write
        waits for: a slow reader may need minutes for the room that one write takes in a pipe."""
        before, self._unread = self._unread, _unread(self._fd)
        if self._unread < before:
            self._progress = time.monotonic()

    def _is_late(self) -> bool:
        return self._over_at is not None and time.monotonic() >= self._over_at

    def _drop(self, line: bytes, source: Source | None) -> None:
        self._dropped += 1
        if source is not None:
            self._lost[source.path] += len(line) - len(source.prefix)

    def _drop_queue(self) -> None:
        for line, source, kind in self._lines:
            if kind is Text.LINE:
                self._drop(line, source)
        self._lines.clear()
        self._bytes = 0

    def _push(self, line: bytes, source: Source | None, kind: Text = Text.LINE) -> None:
        if not self._lines and not self._writing:
            self._progress = time.monotonic()  # an idle console is not a frozen one
            self._unread = _unread(self._fd)
        if self._untold:
            notice = b"elasticrun: %d lines were not shown: the console was frozen\n" % self._untold
            self._untold = 0
            self._lines.append((notice, None, Text.LINE))
            self._bytes += len(notice)
        self._lines.append((line, source, kind))
        self._bytes += len(line)
        self.start()
        self._changed.notify_all()

    # ---------------------------------------------------------------- the writer's side

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                while not self._lines or (self._held and not self._is_late()):
                    if self._closing and not self._lines:
                        self._end_line()
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
                    self._drop_queue()
                    self._changed.notify_all()
                return

    def _take(self) -> bytes:
        """Whole lines of one write; called with the lock held and a line in the queue."""
        columns, size = columns_of(self._fd), 0
        chunk: list[bytes] = []
        while self._lines and (not chunk or size + len(self._lines[0][0]) <= CHUNK_BYTES):
            text, source, kind = self._lines.popleft()
            size += len(text)
            if kind is Text.BAR:
                text = cut_to(text, columns)
            owner, ends = source.owner if source is not None else self, kind is Text.LINE
            chunk.append(self._open_line.then(owner, text, ends=ends, columns=columns))
        self._bytes -= size
        return b"".join(chunk)

    def _end_line(self) -> None:
        """What comes next is not the ranks': it begins on a line of its own."""
        with contextlib.suppress(OSError):
            self._write(self._open_line.then(self, b""))

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
                self._unread = _unread(self._fd)
                self._progress = time.monotonic()


def _unread(fd: int) -> int:
    """Bytes that were written to a pipe or a terminal and that nobody has read yet; 0 where the
    kernel does not tell."""
    count = array.array("i", [0])
    try:
        asks = termios.FIONREAD if stat.S_ISFIFO(os.fstat(fd).st_mode) else termios.TIOCOUTQ
        fcntl.ioctl(fd, asks, count)
    except OSError:
        return 0
    return count[0]
