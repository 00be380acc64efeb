"""The system calls by which files get onto a disk, in one object: a test can refuse some."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import Final

_LIBC: Final = ctypes.CDLL(None, use_errno=True)

GCSFUSE: Final = "fuse.gcsfuse"
"""Type in the mount table."""


class Calls:
    """Each raises OSError as the call itself does."""

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o666)

    def fallocate(self, fd: int, size: int) -> None:
        """Linux's own call. C libraries imitate posix_fallocate where a file system has none, by
        writing into every block: hours over a network."""
        call = getattr(_LIBC, "fallocate64", _LIBC.fallocate)
        while call(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
            number = ctypes.get_errno()
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number))

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def write(self, fd: int, data: memoryview) -> int:
        return os.write(fd, data)

    def cached(self, fd: int) -> None:
        """No longer O_DIRECT from here on."""
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def drop(self, fd: int) -> None:
        """What was written need not stay in the page cache."""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def mkdir(self, path: str) -> None:
        os.mkdir(path)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def remove(self, path: str) -> None:
        """A folder with all that is in it; links in it are not followed."""
        shutil.rmtree(path)

    def mounts(self) -> str:
        return Path("/proc/self/mounts").read_text(errors="surrogateescape")


def is_gcsfuse(path: str, mounts: str) -> bool:
    """Whether `path` (absolute, resolved) lies on a bucket that gcsfuse has mounted."""
    deepest, kind = "", ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ").rstrip("/")
        if (path == point or path.startswith(point + "/")) and len(point) >= len(deepest):
            deepest, kind = point, fields[2]
    return kind == GCSFUSE
