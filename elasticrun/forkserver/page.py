"""What a forked rank tells the fork server, without an fd that the script could see.

Each rank shares one anonymous page run with the server. The rank appends records and pokes the
server with SIGCHLD, which the server has a handler for in any case; what was not poked is read
when the rank is reaped. Records beyond the bound are dropped, so nothing here can block or grow.
"""

from __future__ import annotations

import _thread
import mmap
import os
import signal
from collections.abc import Iterator

PAGE_BYTES = 128 * 1024
"""Room for the names of some 3,000 modules; transformers' and lightning's imports need half."""

NOTICE = b"N"  # a sentence for the operator
EXEC_NEXT = b"X"  # later lives of this script are to be exec'd
MODULE = b"M"  # a module was looked for
IMPORTING = b"I"  # imports are under way
FAILED = b"F"  # the rank could not be started; a sentence

_HEADER = 4
_MAX_TEXT = 2000


class Page:
    """One rank's page; the rank writes, the server reads."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, PAGE_BYTES)
        self._server = os.getpid()
        self._writer = 0
        self._read = _HEADER
        self._lock = _thread.allocate_lock()

    # ------------------------------------------------------------ in the rank

    def adopt(self) -> None:
        """This process writes from now on; processes that it forks itself stay silent."""
        self._writer = os.getpid()
        self._lock = _thread.allocate_lock()

    def write(self, kind: bytes, text: str, *, poke: bool = True) -> None:
        """Append a record, cut to a bounded length; dropped when the page is full."""
        if os.getpid() != self._writer:
            return
        body = kind + text.encode("utf-8", "backslashreplace")[:_MAX_TEXT]
        with self._lock:
            end = self._end()
            if end + 2 + len(body) <= PAGE_BYTES:
                self._memory[end : end + 2 + len(body)] = len(body).to_bytes(2, "little") + body
                self._memory[:_HEADER] = (end + 2 + len(body)).to_bytes(_HEADER, "little")
        if poke:
            self.poke()

    def poke(self) -> None:
        """Have the server read. A rank that changed its user may not; it is read at its end."""
        if os.getppid() == self._server:
            try:
                os.kill(self._server, signal.SIGCHLD)
            except PermissionError:
                pass

    # ------------------------------------------------------------ in the server

    def read(self) -> Iterator[tuple[bytes, str]]:
        """The records since the last call. What a rank scribbled over the page ends the reading;
        it can do no more than say nothing."""
        end = self._end()
        while self._read + 2 <= end:
            length = int.from_bytes(self._memory[self._read : self._read + 2], "little")
            start = self._read + 2
            if not 1 <= length <= end - start:
                self._read = PAGE_BYTES
                return
            self._read = start + length
            body = self._memory[start : start + length]
            yield body[:1], body[1:].decode("utf-8", "replace")

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()

    def _end(self) -> int:
        end = int.from_bytes(self._memory[:_HEADER], "little") or _HEADER
        return min(max(end, _HEADER), PAGE_BYTES)
