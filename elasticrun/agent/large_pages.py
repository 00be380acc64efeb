"""Shared memory in pages of 2 MiB, where the kernel has them: all of it blocks.

A rank that is born maps its segment anew. In pages of 4 KiB that costs some 80 ms a GiB before the
first byte is copied, and half as much again when the rank dies; in large pages next to nothing, and
the pages themselves are had in a third of the time. MADV_COLLAPSE (Linux 6.1) makes one of a
stretch of 2 MiB that has at least one page, whatever the machine's settings for shared memory say.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any, Final

from elasticrun.wire.mapping import LARGE, map_shared, system

MADV_COLLAPSE: Final = 25

MOST_FAILED: Final = 16
"""Stretches in a row of which no large page could be made: memory is in pieces, and the kernel
takes milliseconds to find that out for each."""


def take(fd: int, nbytes: int) -> str:
    """Give a file of shared memory large pages for its first `nbytes`, as far as they can be had,
    all zero. "" if some could be; else a clause that says why not. What has none has a page of
    4 KiB at most: take the rest with posix_fallocate, which also says if there is no room."""
    size = nbytes // LARGE * LARGE
    if not size:
        return ""
    try:
        mapped = map_shared(fd, size)
    except OSError as error:
        return str(error.strerror)
    return _collapse(system(), fd, ctypes.addressof(mapped), size)


def _collapse(libc: Any, fd: int, begin: int, size: int) -> str:
    failed, made, why = 0, 0, ""
    for at in range(0, size, LARGE):
        try:
            os.pwrite(fd, b"\0", at)
        except OSError as error:  # no room: posix_fallocate says so
            return "" if made else str(error.strerror)
        if libc.madvise(begin + at, LARGE, MADV_COLLAPSE) == 0:
            failed, made = 0, made + 1
            continue
        number = ctypes.get_errno()
        why, failed = why or os.strerror(number), failed + 1
        if failed == MOST_FAILED or number not in (errno.EAGAIN, errno.EBUSY):
            break
    return "" if made else why
