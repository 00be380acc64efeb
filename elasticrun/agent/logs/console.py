"""The console copy of the ranks' output: a thread that may block, and a bounded queue.

Ctrl-S, tmux's copy mode or `| less` block whoever writes to a terminal. Here only a dedicated
thread blocks, and nothing waits for it: ranks write to their files and the agent keeps sending
heartbeats. Lines that a frozen terminal does not take are dropped and counted per file. A console
that is merely slow loses nothing: as long as somebody reads it, the thread that reads the files
waits for it.
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
"""Limit of the queue in bytes, in addition to the limit in lines."""

FROZEN_AFTER: Final = 5.0
"""Seconds without progress after which a console counts as frozen and lines are dropped. A higher
value allows longer pauses in a pager, but delays the filtered copies for as long."""

CHECKS: Final = 8
"""Number of times per FROZEN_AFTER that the kernel is asked how much is still unread. Other writers
to the same terminal can hide a reader from a single query."""

CHUNK_BYTES: Final = 4096
"""Maximum bytes per write, in whole lines (a longer line is written alone). A pipe takes this much
atomically, so lines of ranks and of other writers do not mix."""


class Text(Enum):
    """The kind of a queued text."""

    LINE = "line"  # with a line break
    PARTIAL = "partial"  # the beginning of a line; more may follow
    BAR = "bar"  # a state of a progress bar; the next state overwrites it


class Source(Protocol):
    """The file that lines come from, and the prefix written before each line."""

    path: str
    prefix: bytes

    @property
    def owner(self) -> object:
        """Identifies the writer of a line: the next text of the same owner continues or overwrites
        an open line of its own."""


class ConsoleWriter:
    """Writes lines to a file descriptor from a thread; only one other thread may call `put`."""

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
        self._unread = 0  # bytes in the kernel's buffer at the last query
        self._writing = False
        self._held = False
        self._awaited = False
        self._broken = False
        self._closing = False
        self._deadline: float | None = None
        self._unreported = 0
        self._dropped = 0
        self._lost: Counter[str] = Counter()
        self._thread: threading.Thread | None = None

    @property
    def is_terminal(self) -> bool:
        """Whether the console is a terminal."""
        return os.isatty(self._fd)

    @property
    def dropped(self) -> int:
        """Number of lines dropped so far."""
        with self._changed:
            return self._dropped

    @property
    def lost(self) -> dict[str, int]:
        """Bytes that were never shown, by path of their file."""
        with self._changed:
            return dict(self._lost)

    @property
    def is_awaited(self) -> bool:
        """Whether a `put` is waiting for space in the queue."""
        with self._changed:
            return self._awaited

    @property
    def is_over(self) -> bool:
        """Whether output has stopped for good: the console is closed, or the deadline has
        passed."""
        with self._changed:
            return self._broken or self._is_late()

    @property
    def why_over(self) -> str:
        """Why output was not shown, as text."""
        if self._broken:
            return "the console was closed"
        if self._deadline is not None:
            return "the time limit was reached"
        return f"nobody read the console for {self._patience:g} s"

    def start(self) -> None:
        """Start the thread. Raises RuntimeError if no thread can start."""
        if self._thread is None:
            thread = threading.Thread(
                target=self._run, name=f"elasticrun-console-{self._fd}", daemon=True
            )
            thread.start()
            self._thread = thread

    def put(self, lines: Iterable[bytes], source: Source | None = None) -> None:
        """Queue whole lines. Waits while the queue is full and somebody reads; drops a line if
        nobody has read for `patience` seconds."""
        with self._changed:
            for line in lines:
                if self._closing or self._broken or not self._await_room(len(line)):
                    self._drop(line, source)
                    self._unreported += not self._broken
                else:
                    self._push(line, source)

    def show(self, text: bytes, source: Source, kind: Text) -> None:
        """Queue the beginning of a line, or a state of a progress bar. It replaces a queued text of
        the same source and kind, and is dropped if the queue is full or the console is closing,
        because the whole line comes later."""
        with self._changed:
            if self._lines and self._lines[-1][1:] == (source, kind):
                self._bytes -= len(self._lines.pop()[0])
            if len(self._lines) < self._capacity and not (self._closing or self.is_over):
                self._push(text, source, kind)

    def count_lost(self, path: str, count: int) -> None:
        """Count bytes of a file as not shown; they are not even read."""
        with self._changed:
            self._lost[path] += count

    def hold(self, held: bool) -> None:
        """Pause output while another console of the same terminal has precedence, or resume it."""
        with self._changed:
            self._held = held
            self._progress = time.monotonic()
            self._changed.notify_all()

    def hurry(self, until: float) -> None:
        """Drop what is not shown by this time of the monotonic clock."""
        with self._changed:
            self._deadline = until
            self._changed.notify_all()

    def close(self, timeout: float) -> int:
        """Write what is queued; drop the rest when nobody reads for `timeout` seconds.

        Returns the total number of dropped lines. May be called again."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            began = time.monotonic()
            while (self._lines or self._writing) and not self._broken:
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
            if self._broken or self._closing:
                return False
            self._awaited = True
            read_on = self._wait_for_reader(self._patience, 0.0)
            self._awaited = False
            if not read_on:
                return False
        return not self._is_late()

    def _wait_for_reader(self, patience: float, since: float) -> bool:
        """Wait for a change. Returns False if nobody has read for `patience` seconds, or the
        deadline has passed. Time in which this process did not run counts only towards the
        deadline: the reader may not have run either."""
        self._check_reader()
        now = time.monotonic()
        rest = patience if self._held else max(self._progress, since) + patience - now
        if self._deadline is not None:
            rest = min(rest, self._deadline - now)
        if rest <= 0:
            return False
        pause = min(rest, patience / CHECKS)
        self._changed.wait(pause)
        if (late := time.monotonic() - now - pause) > 0:
            self._progress = max(self._progress, since) + late
        return True

    def _check_reader(self) -> None:
        """Check whether the reader has read since the last check, even less than a whole write: a
        slow reader may need minutes to free the space of one write in a pipe."""
        before, self._unread = self._unread, _unread_bytes(self._fd)
        if self._unread < before:
            self._progress = time.monotonic()

    def _is_late(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

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
            self._progress = time.monotonic()  # an idle console is not frozen
            self._unread = _unread_bytes(self._fd)
        if self._unreported:
            notice = (
                b"elasticrun: %d lines were not shown: the console was frozen\n" % self._unreported
            )
            self._unreported = 0
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
            except OSError:  # nobody reads any more; the job does not depend on it
                with self._changed:
                    self._broken, self._writing = True, False
                    self._drop_queue()
                    self._changed.notify_all()
                return

    def _take(self) -> bytes:
        """Take whole lines for one write. The caller holds the lock; the queue is not empty."""
        columns, size = columns_of(self._fd), 0
        chunk: list[bytes] = []
        while self._lines and (not chunk or size + len(self._lines[0][0]) <= CHUNK_BYTES):
            text, source, kind = self._lines.popleft()
            size += len(text)
            if kind is Text.BAR:
                text = cut_to(text, columns)
            owner, ends = source.owner if source is not None else self, kind is Text.LINE
            chunk.append(self._open_line.bytes_to_write(owner, text, ends=ends, columns=columns))
        self._bytes -= size
        return b"".join(chunk)

    def _end_line(self) -> None:
        """End an open line, so that the next writer starts on a new one."""
        with contextlib.suppress(OSError):
            self._write(self._open_line.bytes_to_write(self, b""))

    def _write(self, chunk: bytes) -> None:
        rest = memoryview(chunk)
        while rest:
            try:
                taken = os.write(self._fd, rest)
            except BlockingIOError:  # another process made the shared terminal non-blocking
                poller = select.poll()
                poller.register(self._fd, select.POLLOUT)
                poller.poll()
                continue
            rest = rest[taken:]
            with self._changed:
                self._unread = _unread_bytes(self._fd)
                self._progress = time.monotonic()


def _unread_bytes(fd: int) -> int:
    """Bytes in a pipe or terminal that nobody has read yet; 0 if the kernel cannot tell."""
    count = array.array("i", [0])
    try:
        request = termios.FIONREAD if stat.S_ISFIFO(os.fstat(fd).st_mode) else termios.TIOCOUTQ
        fcntl.ioctl(fd, request, count)
    except OSError:
        return 0
    return count[0]
