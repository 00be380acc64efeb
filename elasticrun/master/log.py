"""The master's lines on stderr, glog-like as torchrun's are.

A frozen terminal blocks whoever writes to it, so lines pass through a bounded queue to a thread
(DROP-IN 8); what does not fit is dropped.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from typing import Final

QUEUE_LINES: Final = 2000
"""Lines held for a frozen terminal; a master says little."""

_LETTERS = {"WARNING": "W", "ERROR": "E", "CRITICAL": "C"}


class QueuedLines(logging.Handler):
    """Formats in the caller's thread, writes in a daemon thread of its own."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._lines: queue.Queue[bytes | threading.Event] = queue.Queue(QUEUE_LINES)
        threading.Thread(target=self._run, name="elasticrun-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        letter = _LETTERS.get(record.levelname, "I")
        stamp = time.strftime("%m%d %H:%M:%S", time.localtime(record.created))
        micros = int(record.created % 1 * 1e6)
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + logging.Formatter().formatException(record.exc_info)
        head = f"{letter}{stamp}.{micros:06d} {record.process} elasticrun/master] "
        try:
            self._lines.put_nowait((head + text + "\n").encode(errors="backslashreplace"))
        except queue.Full:
            pass

    def drain(self, limit: float) -> None:
        """Wait until what was queued is written, `limit` seconds at most."""
        written = threading.Event()
        try:
            self._lines.put_nowait(written)
        except queue.Full:
            return
        written.wait(limit)

    def _run(self) -> None:
        while True:
            item = self._lines.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                while item:
                    item = item[os.write(self._fd, item) :]
            except OSError:  # nobody reads; the job does not depend on it
                pass


def set_up(level: str) -> QueuedLines:
    """Send elasticrun's log to stderr from `level` (a word or number, WARNING if not understood);
    libraries of this process stay silent below CRITICAL."""
    handler = QueuedLines(sys.__stderr__.fileno() if sys.__stderr__ else 2)
    logger = logging.getLogger("elasticrun")
    word = level.strip().upper()
    known = int(word) if word.isdecimal() else logging.getLevelName(word)
    logger.setLevel(known if isinstance(known, int) else logging.WARNING)
    logger.handlers[:] = [handler]
    logger.propagate = False
    # asyncio, grpc and uvicorn log what strangers send them; none of it is the user's business.
    logging.getLogger().handlers[:] = [logging.NullHandler()]
    return handler
