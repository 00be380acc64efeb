"""Notifications from the kernel (inotify(7)) that another process has written a file.

The standard library has no inotify, and the usual small package runs `ldconfig` and a compiler to
find libc, which would start processes inside the agent. Two system calls are all that is needed.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Final

IN_MODIFY: Final = 0x0000_0002
IN_MOVED_TO: Final = 0x0000_0080
_IN_Q_OVERFLOW: Final = 0x0000_4000
_HEADER: Final = struct.Struct("iIII")
_READ_BYTES: Final = 64 * 1024


class Inotify:
    """One inotify instance; `fileno()` becomes readable when a watched file was written.

    Its constructor raises OSError if the kernel refuses (limits per user) or has no inotify.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        try:
            self._fd: int = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        except AttributeError as error:
            raise OSError("this system has no inotify") from error
        if self._fd < 0:
            raise _last_error()

    def fileno(self) -> int:
        """The file descriptor to poll for reading."""
        return self._fd

    def watch(self, path: str, mask: int = IN_MODIFY) -> int:
        """Watch an existing file for writes, or with `mask` a path for other events; returns the
        number by which `read` names it. Raises OSError."""
        number: int = self._libc.inotify_add_watch(self._fd, os.fsencode(path), mask)
        if number < 0:
            raise _last_error()
        return number

    def unwatch(self, number: int) -> None:
        """Stop watching; a no-op if the number is not watched any more."""
        self._libc.inotify_rm_watch(self._fd, number)

    def read(self) -> set[int] | None:
        """Numbers of the files that were written since the last call; does not wait. None if the
        kernel's queue overflowed: any file may have been written."""
        written: set[int] = set()
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return written
        offset = 0
        while offset + _HEADER.size <= len(data):
            number, mask, _cookie, length = _HEADER.unpack_from(data, offset)
            if mask & _IN_Q_OVERFLOW:
                return None
            written.add(number)
            offset += _HEADER.size + length
        return written

    def close(self) -> None:
        """Close the instance."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
