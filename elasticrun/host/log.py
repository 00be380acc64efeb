"""Log lines of agent and master on stderr.

A line has the form `elasticrun: text`, or in a job of several nodes `elasticrun[NODE]: text`. With
LOGLEVEL=DEBUG lines have torchrun's format (glog) with time and source location: `W1121
02:57:27.668000 PID elasticrun/agent/node.py:9] text`.

Lines of level NOTICE report the main events of the job (which nodes joined, what was lost, what it
cost). They are shown by default; INFO and DEBUG are shown if LOGLEVEL requests them.

A frozen terminal (Ctrl-S, a pager) blocks its writers, so lines go through a bounded queue to a
thread. Lines that do not fit are dropped and counted, and the next line written is preceded by
their number.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import sys
import threading
import time
from contextlib import suppress
from typing import Final

from elasticrun.host.system.sandbox import NoThread, start_thread
from elasticrun.wire import env

QUEUE_LINES: Final = 2000
"""Maximum number of lines queued while the terminal is frozen."""

NOTICE: Final = 25
"""The level of the main events, between INFO and WARNING."""

LEVELS: Final = {"info": logging.INFO, "notice": NOTICE, "warning": 30, "error": 40}
"""The levels of `logging` by their names in `core`."""

logger = logging.getLogger("elasticrun")

_LETTERS = {"DEBUG": "V", "WARNING": "W", "ERROR": "E", "CRITICAL": "C"}
_COLOURS = {NOTICE: "36", logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "31"}
_PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def _text(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    text = record.getMessage()
    return f"{text}\n{formatter.formatException(record.exc_info)}" if record.exc_info else text


class GlogFormatter(logging.Formatter):
    """Formats a line as level letter, date, time with microseconds, pid, source location, text."""

    def format(self, record: logging.LogRecord) -> str:
        letter = _LETTERS.get(record.levelname, "I")
        stamp = time.strftime("%m%d %H:%M:%S", time.localtime(record.created))
        micros = int(record.created % 1 * 1e6)
        place = os.path.relpath(record.pathname, _PACKAGE_ROOT)
        head = f"{letter}{stamp}.{micros:06d} {record.process} {place}:{record.lineno}]"
        return f"{head} {_text(self, record)}"


class PlainFormatter(logging.Formatter):
    """Formats a line as sender and text; `colour`: the sender in the color of the level."""

    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self.who = "elasticrun"
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        text = _text(self, record)
        code = _COLOURS.get(record.levelno, "") if self._colour else ""
        return f"\x1b[{code}m{self.who}:\x1b[0m {text}" if code else f"{self.who}: {text}"


class OpenLine:
    """The unterminated line on one terminal or pipe (a prompt, a progress bar), shared by all
    writers of this process. Another writer terminates it before its own text."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: object = None
        self._shown = b""
        self._broken: dict[object, bytes] = {}
        """Unterminated lines that other writers have terminated, by owner."""

    def bytes_to_write(
        self, owner: object, data: bytes, *, ends: bool = True, columns: int = 0
    ) -> bytes:
        """The bytes to write so that `data`, the complete line of `owner` so far, is shown next.

        `ends`: `data` ends with a line break. `columns`: the width of a terminal, on which a
        shorter line can be overwritten; 0: lines cannot be overwritten."""
        with self._lock:
            before = self._broken.pop(owner, None)
            if before is not None and data.rstrip(b"\n") == before:  # already shown, and terminated
                if not ends:
                    self._broken[owner] = before
                return b""
            last, shown = self._owner, self._shown
            self._owner, self._shown = (None, b"") if ends else (owner, data)
            if last is None:
                return data
            if last != owner:
                self._broken[last] = shown
                return b"\n" + data
        if data.startswith(shown):
            return data[len(shown) :]
        if len(shown.decode(errors="replace")) >= columns:
            return b"\n" + data
        return b"\r" + data.rstrip(b"\n") + _TO_END_OF_LINE + (b"\n" if ends else b"")


_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")

_TO_END_OF_LINE = b"\x1b[K"
"""Escape sequence that clears the rest of an earlier, longer text."""

_open_lines: dict[tuple[int, int, int], OpenLine] = {}


def columns_of(fd: int) -> int:
    """The width of a terminal that supports overwriting a line; else 0."""
    if os.environ.get("TERM", "dumb") == "dumb":
        return 0
    try:
        return os.get_terminal_size(fd).columns or 80
    except OSError:
        return 0


def cut_to(text: bytes, columns: int) -> bytes:
    """The text, cut to fit on one line of a terminal so that it can be overwritten. A cut text
    loses its escape sequences, because one could be cut in two. `columns` 0: not cut."""
    bare = _ESCAPES.sub("", text.decode(errors="replace"))
    return text if not columns or len(bare) < columns else bare[: columns - 1].encode()


def open_line(fd: int) -> OpenLine:
    """The OpenLine of the terminal, pipe or file behind this descriptor."""
    try:
        found = os.fstat(fd)
    except OSError:
        return OpenLine()
    return _open_lines.setdefault((found.st_dev, found.st_ino, found.st_rdev), OpenLine())


class StderrWriter:
    """Writes queued text to a file descriptor in a thread, so that callers do not block."""

    def __init__(self, fd: int = 2) -> None:
        self._fd = fd
        self._queue: queue.Queue[bytes | threading.Event] = queue.Queue(QUEUE_LINES)
        self._dropped = 0
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def write(self, text: str) -> None:
        """Queue `text` as it is; drop it if the queue is full."""
        try:
            self._start()
        except NoThread:  # write it here, and block, rather than lose the line
            with suppress(OSError):
                os.write(self._fd, text.encode(errors="backslashreplace"))
            return
        try:
            self._queue.put_nowait(text.encode(errors="backslashreplace"))
        except queue.Full:
            self._dropped += 1

    def flush(self, limit: float) -> bool:
        """Wait until everything queued has been written; False if that takes longer than about
        `limit` seconds."""
        if self._thread is None:
            return True
        written = threading.Event()
        try:
            self._queue.put(written, timeout=limit)
        except queue.Full:
            return False
        return written.wait(limit)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = start_thread(self._run, "stderr")

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            if self._dropped:
                item = b"elasticrun: %d lines were dropped\n" % self._dropped + item
                self._dropped = 0
            item = open_line(self._fd).bytes_to_write(self, item)
            try:
                while item:
                    item = item[os.write(self._fd, item) :]
            except OSError:  # no reader is left; the job does not depend on it
                pass


class WriterHandler(logging.Handler):
    """A logging handler that passes lines to a StderrWriter."""

    def __init__(self, writer: StderrWriter, formatter: logging.Formatter) -> None:
        super().__init__()
        self.writer = writer
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        self.writer.write(self.format(record) + "\n")


def level_from(word: str) -> int:
    """The level of `logging` for a name or a number; WARNING if invalid."""
    word = word.strip().upper()
    if word.isdecimal():
        return int(word)
    level = LEVELS.get(word.lower()) or logging.getLevelName(word)
    return level if isinstance(level, int) else logging.WARNING


def set_up(default: int = NOTICE) -> StderrWriter:
    """Send the package's log lines of level LOGLEVEL (or `default`) and above to stderr; returns
    the writer, which accepts other text as well. Later calls only return it."""
    if (handler := _handler()) is not None:
        return handler.writer
    fd = sys.stderr.fileno() if _has_fileno() else 2
    word = os.environ.get(env.LOGLEVEL, "")
    level = level_from(word) if word.strip() else default
    plain = PlainFormatter(colour=_wants_colour(fd))
    handler = WriterHandler(StderrWriter(fd), GlogFormatter() if level <= logging.DEBUG else plain)
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    return handler.writer


def set_prefix(who: str) -> None:
    """Set the sender of all later lines, such as `elasticrun[a]`. A no-op with LOGLEVEL=DEBUG."""
    handler = _handler()
    if handler is not None and isinstance(handler.formatter, PlainFormatter):
        handler.formatter.who = who


def log_last_word(sentence: str, at: int = logging.ERROR) -> None:
    """Write why this process exits as a log line, whatever LOGLEVEL is."""
    handler = _handler()
    if handler is not None:
        handler.handle(logger.makeRecord(logger.name, at, __file__, 0, sentence, (), None))


def _handler() -> WriterHandler | None:
    return next((one for one in logger.handlers if isinstance(one, WriterHandler)), None)


def _wants_colour(fd: int) -> bool:
    """Whether to use colors: on a terminal, unless NO_COLOR (https://no-color.org) or TERM says
    otherwise."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return False
    return os.isatty(fd)


def _has_fileno() -> bool:
    try:
        return sys.stderr.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False
