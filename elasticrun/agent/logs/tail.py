"""Reads the log files of tee'd streams while ranks write them: one thread, woken by inotify.

Ranks write their files themselves; this module only makes the copies for users (console, filtered
files). Lines keep the order of the file. The beginning of an unfinished line (a prompt, a progress
bar) is shown on the console after a moment, and written out whole once it ends. As under torchrun a
carriage return also ends a line; on a terminal the next line overwrites it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import select
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from elasticrun.agent.logs.console import ConsoleWriter, Text
from elasticrun.agent.logs.folded import FoldedConsole
from elasticrun.config import LOG_DRAIN
from elasticrun.host.log import logger
from elasticrun.host.system.inotify import Inotify

MAX_LINE_BYTES: Final = 64 * 1024
"""Maximum bytes held of an unfinished line; when it is longer, they are passed on as a line."""

READ_BYTES: Final = 256 * 1024
"""Bytes per read; a rank with much output gets this much before the next file's turn."""

BATCH_SECONDS: Final = 0.01
"""Seconds to wait between two reads of the files, so that a rank that prints a thousand short lines
costs a few wake-ups. Raise it to save CPU; the copy is delayed by as much."""

SHOW_AFTER: Final = 0.3
"""Seconds after which the beginning of an unfinished line is shown."""

TIMER_SECONDS: Final = 0.1
"""Seconds between reads of the files if there is no inotify (torchrun's interval)."""

_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")


class LineFilter:
    """A file that receives the lines which contain any of the needles."""

    def __init__(self, path: str, needles: Iterable[str]) -> None:
        self._needles = tuple(needle.encode(errors="surrogateescape") for needle in needles)
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 (closed with its attempt)

    def pass_on(self, lines: list[bytes]) -> None:
        """Write the matching lines; a full disk ends this copy, not the thread."""
        hits = [line for line in lines if any(needle in line for needle in self._needles)]
        if hits:
            try:
                self._file.write(b"".join(hits))
            except OSError as error:
                logger.warning("cannot write %s: %s", self._file.name, error)
                self._needles = ()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(slots=True)
class Tail:
    """One stream of one rank in one attempt: its file and the destinations of its lines."""

    local_rank: int
    path: str
    prefix: bytes
    console: ConsoleWriter
    filter: LineFilter | None = None
    folded: FoldedConsole | None = None
    """If set, lines go here instead of directly to the console."""
    fd: int = -1
    watch: int = -1
    held: bytes = b""  # the beginning of an unfinished line
    drain_until: float | None = None
    show_at: float | None = None
    """When to show `held`."""
    in_bar: bool = False
    """Whether the last line ended in a carriage return, so that the next one overwrites it."""

    @property
    def owner(self) -> object:
        """As in `console.Source`."""
        return self.path

    def read_once(self) -> int:
        """Read once and pass complete lines on; returns the number of bytes read."""
        data = os.read(self.fd, READ_BYTES)
        if not data and os.fstat(self.fd).st_size < os.lseek(self.fd, 0, os.SEEK_CUR):
            os.lseek(self.fd, 0, os.SEEK_SET)  # the script truncated its log: as tail -F does
            data = os.read(self.fd, READ_BYTES)
        text = self.held + data
        lines: list[tuple[bytes, bool]] = []
        start = 0
        for end in _LINE_END.finditer(text):
            self.in_bar = is_bar = end[0] == b"\r"
            if not is_bar or end.start() > start:  # a bar may begin with \r: nothing is there yet
                lines.append((text[start : end.start()], is_bar))
            start = end.end()
        if data:
            self.show_at = None if start == len(text) else self._when_to_show(anew=bool(lines))
        self.held = text[start:]
        while len(self.held) > MAX_LINE_BYTES:
            lines.append((self.held[:MAX_LINE_BYTES], False))
            self.held = self.held[MAX_LINE_BYTES:]
        self._pass_on(lines)
        return len(data)

    def _when_to_show(self, *, anew: bool) -> float:
        now = time.monotonic() + SHOW_AFTER
        return now if anew or self.show_at is None else self.show_at

    def show(self) -> None:
        """Show the beginning of a line; its end is later appended, or overwrites it."""
        self.show_at = None
        text = self.held.rstrip(b"\r")
        if not text:
            return
        if self.folded is not None:
            self.folded.add_partial(self.local_rank, text, is_bar=self.in_bar)
        else:
            kind = Text.BAR if self.in_bar else Text.PARTIAL
            self.console.show(self.prefix + text, self, kind)

    def finish(self, got: Callable[[int], None]) -> None:
        """Read up to the current end of the file, even if somebody keeps writing; then pass on an
        unfinished last line. Calls `got` with the number of bytes of each read. Bytes that would be
        neither shown nor kept are counted, not read."""
        size = os.fstat(self.fd).st_size
        while os.lseek(self.fd, 0, os.SEEK_CUR) < size:
            if self.console.is_over and self.filter is None:
                self.skip()
                break
            if not (count := self.read_once()):
                break
            got(count)
        if self.held:
            self._pass_on([(self.held.rstrip(b"\r"), False)])
            self.held = b""

    def skip(self) -> None:
        """Count the rest of the file as not shown."""
        rest = os.fstat(self.fd).st_size - os.lseek(self.fd, 0, os.SEEK_CUR)
        self.console.count_lost(self.path, max(0, rest))
        os.lseek(self.fd, 0, os.SEEK_END)

    def _pass_on(self, texts: list[tuple[bytes, bool]]) -> None:
        """Pass lines on; the flag is set if a line is a state of a progress bar."""
        if not texts:
            return
        if self.filter is not None or self.folded is None:
            lines = [self.prefix + line + b"\n" for line, _ in texts]
            if self.filter is not None:
                self.filter.pass_on(lines)
            if self.folded is None:
                self._put(lines, texts)
        if self.folded is not None:
            self.folded.add(self.local_rank, texts)

    def _put(self, lines: list[bytes], texts: list[tuple[bytes, bool]]) -> None:
        """Write to the console; on a terminal the states of a progress bar overwrite each other."""
        if not self.console.is_terminal:
            self.console.put(lines, self)
            return
        for line, (text, is_bar) in zip(lines, texts, strict=True):
            if not is_bar:
                self.console.put([line], self)
            elif text:
                self.console.show(line.removesuffix(b"\n"), self, Text.BAR)


@dataclass(slots=True)
class Reader:
    """The reader thread. Its public methods return at once, except `join`; any other thread may
    call them."""

    make_inotify: Callable[[], Inotify] = Inotify
    logged: set[str] = field(default_factory=set)
    """Warnings already logged, by this reader or another one that shares the set."""
    _inbox: queue.SimpleQueue[Callable[[], None] | None] = field(default_factory=queue.SimpleQueue)
    """Work for the thread; None: stop."""
    _tails: list[Tail] = field(default_factory=list)
    _filters: list[LineFilter] = field(default_factory=list)
    _inotify: Inotify | None = None
    _poller: select.poll = field(default_factory=select.poll)
    _wake: int = -1
    _thread: threading.Thread | None = None
    _ending: bool = False
    progress: int = 0
    """Bytes read so far; grows while the reader makes progress."""

    def add(self, tails: Collection[Tail], filters: Iterable[LineFilter] = ()) -> None:
        """Follow these files. Files of an earlier attempt are finished first, so that lines of two
        attempts do not mix. Raises RuntimeError if no thread can start."""
        self._start()
        for tail in tails:
            tail.console.start()
        self._send(partial(self._follow, tuple(tails), tuple(filters)))

    def rank_exited(self, local_rank: int) -> None:
        """Call when the rank has been reaped. Its leftover processes may write for another
        LOG_DRAIN seconds."""
        if self._thread is not None:
            self._send(partial(self._drain, local_rank, time.monotonic() + LOG_DRAIN))

    def stop(self) -> None:
        """Read all that the files contain now and stop; `join` waits for that."""
        if self._thread is not None and not self._ending:
            self._ending = True
            self._send(None)

    def join(self, timeout: float, console: ConsoleWriter) -> bool:
        """Wait for the reader to stop. Returns False if it made no progress for `timeout` seconds
        (a disk that hangs) and was not waiting for its console; the thread is then abandoned."""
        thread = self._thread
        if thread is None:
            return True
        seen = -1
        while thread.is_alive() and (seen != self.progress or console.is_awaited):
            seen = self.progress
            thread.join(timeout)
        return not thread.is_alive()

    def _start(self) -> None:
        """Start the thread, unless it runs. Raises RuntimeError if no thread can start."""
        if self._thread is not None:
            return
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        thread = threading.Thread(target=self._watch, name="elasticrun-tail", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            os.close(self._wake)
            raise
        self._thread = thread

    def _send(self, work: Callable[[], None] | None) -> None:
        self._inbox.put(work)
        os.eventfd_write(self._wake, 1)

    # ---------------------------------------------------------------- in the thread

    def _watch(self) -> None:
        """The thread's body. A bug of ours is logged and ends the copy, not the job."""
        try:
            self._run()
        except Exception:
            logger.exception("the ranks' output is no longer shown: a bug in elasticrun")
            for tail in self._tails:
                with contextlib.suppress(OSError):
                    tail.skip()

    def _run(self) -> None:
        self._poller.register(self._wake, select.POLLIN)
        try:
            self._inotify = self.make_inotify()
            self._poller.register(self._inotify.fileno(), select.POLLIN)
        except OSError as error:
            self._fall_back(error)
        while True:
            ready = {fd for fd, _ in self._poller.poll(self._wait_ms())}
            if self._wake in ready:
                os.eventfd_read(self._wake)
                if not self._run_queued():
                    break
            self._read_changed(ready)
            self._show_partial()
            self._expire()
            for folded in self._folded():
                folded.tick()
            self._batch()
        self._finish(self._tails)
        if self._inotify is not None:
            self._inotify.close()
        os.close(self._wake)

    def _folded(self) -> set[FoldedConsole]:
        return {tail.folded for tail in self._tails if tail.folded is not None}

    def _batch(self) -> None:
        """Let writes accumulate briefly; queued work ends the wait."""
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        poller.poll(BATCH_SECONDS * 1000)

    def _wait_ms(self) -> float | None:
        deadlines = [tail.drain_until for tail in self._tails if tail.drain_until is not None]
        deadlines += [tail.show_at for tail in self._tails if tail.show_at is not None]
        deadlines += [due for folded in self._folded() if (due := folded.due()) is not None]
        if self._inotify is None and self._tails:
            deadlines.append(time.monotonic() + TIMER_SECONDS)
        if not deadlines:
            return None
        return max(0.0, min(deadlines) - time.monotonic()) * 1000 + 1

    def _run_queued(self) -> bool:
        """Run the queued work; returns False on the request to stop."""
        while not self._inbox.empty():
            work = self._inbox.get()
            if work is None:
                return False
            work()
        return True

    def _follow(self, tails: tuple[Tail, ...], filters: tuple[LineFilter, ...]) -> None:
        self._finish(self._tails)
        self._filters.extend(filters)
        for tail in tails:
            self._open(tail)

    def _drain(self, local_rank: int, until: float) -> None:
        for tail in self._tails:
            if tail.local_rank == local_rank:
                tail.drain_until = until
                self._read(tail)

    def _open(self, tail: Tail) -> None:
        try:
            tail.fd = os.open(tail.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            logger.warning("cannot show %s: %s", tail.path, error.strerror)
            return
        self._tails.append(tail)
        if self._inotify is not None:
            try:
                tail.watch = self._inotify.watch(tail.path)
            except OSError as error:
                self._fall_back(error)
        self._read_all([tail])  # content from before the watch causes no event

    def _fall_back(self, error: OSError) -> None:
        """Poll the files from now on, and log that."""
        words = f"no inotify for log files ({error.strerror or error}): they are polled every "
        words += f"{TIMER_SECONDS:g} s instead"
        if words not in self.logged:
            self.logged.add(words)
            logger.warning("%s", words)
        if self._inotify is not None:
            self._poller.unregister(self._inotify.fileno())
            self._inotify.close()
            self._inotify = None

    def _read_changed(self, ready: set[int]) -> None:
        if self._inotify is None:
            due = list(self._tails)
        elif self._inotify.fileno() in ready:
            written = self._inotify.read()
            due = [t for t in self._tails if written is None or t.watch in written]
        else:
            return
        self._read_all(due)

    def _read_all(self, due: list[Tail]) -> None:
        while due:  # in turns, so that much output in one file does not delay the others
            due = [tail for tail in due if self._read(tail) == READ_BYTES]

    def _read(self, tail: Tail) -> int:
        try:
            count = tail.read_once()
        except OSError as error:
            logger.warning("cannot read %s: %s", tail.path, error.strerror)
            self._close(tail)
            return 0
        self._got(count)
        return count

    def _got(self, count: int) -> None:
        self.progress += count

    def _show_partial(self) -> None:
        now = time.monotonic()
        for tail in self._tails:
            if tail.show_at is not None and tail.show_at <= now:
                tail.show()

    def _expire(self) -> None:
        now = time.monotonic()
        self._finish([t for t in self._tails if t.drain_until is not None and t.drain_until <= now])

    def _finish(self, tails: list[Tail]) -> None:
        folded = self._folded()
        for tail in list(tails):
            try:
                tail.finish(self._got)  # each read is progress: `join` must not see a hang
            except OSError as error:
                logger.warning("cannot read %s: %s", tail.path, error.strerror)
            self.progress += 1
            self._close(tail)
        for console in folded - self._folded():
            console.flush()
        if not self._tails:
            for line_filter in self._filters:
                line_filter.close()
            self._filters.clear()

    def _close(self, tail: Tail) -> None:
        self._tails.remove(tail)
        if tail.folded is not None:
            tail.folded.ended(tail.local_rank)
        if self._inotify is not None and tail.watch >= 0:
            self._inotify.unwatch(tail.watch)
        os.close(tail.fd)
