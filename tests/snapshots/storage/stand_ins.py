"""File systems that refuse things, as objects that take the place of the system calls."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from elasticrun.snapshots.storage.writing import Calls


def refusal(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class Poor(Calls):
    """Has neither O_DIRECT nor fallocate nor rename, and does not say so anywhere."""

    def open(self, path: str, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise refusal(errno.EINVAL)
        return super().open(path, flags)

    def fallocate(self, fd: int, size: int) -> None:
        raise refusal(errno.EOPNOTSUPP)

    def rename(self, source: str, target: str) -> None:
        raise refusal(errno.ENOSYS)


class CutOff(Calls):
    """Removes so many files and no more, as where the process is killed."""

    def __init__(self, most: int) -> None:
        self._most = most

    def unlink(self, path: str) -> None:  # type: ignore[override]
        self._most -= 1
        if self._most < 0:
            raise refusal(errno.EIO)
        super().unlink(path)

    def remove(self, path: str) -> None:  # type: ignore[override]
        if self._most < 1:
            raise refusal(errno.EIO)
        super().remove(path)


class LateDirect(Calls):
    """Lets a file be opened with O_DIRECT and refuses to write on it."""

    def __init__(self) -> None:
        self._direct: set[int] = set()

    def open(self, path: str, flags: int) -> int:
        fd = super().open(path, flags & ~os.O_DIRECT)
        if flags & os.O_DIRECT:
            self._direct.add(fd)
        return fd

    def cached(self, fd: int) -> None:
        self._direct.discard(fd)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        if fd in self._direct:
            raise refusal(errno.EINVAL)
        return super().pwrite(fd, data, offset)


class Bucket(Calls):
    """As gcsfuse is: known by the mount table; one sequential writer a file, which can be seen once
    it was closed. What must not be tried there fails the test."""

    def __init__(self, root: Path, hidden: Path) -> None:
        self._root, self._hidden = root, hidden
        self._open: dict[int, str] = {}
        self.closes_fail = False

    def mounts(self) -> str:
        return f"/dev/root / ext4 rw 0 0\nbucket {self._root} fuse.gcsfuse rw,nosuid 0 0\n"

    def open(self, path: str, flags: int) -> int:
        assert not flags & (os.O_DIRECT | os.O_RDWR), "a bucket has no O_DIRECT and no reading back"
        if flags & os.O_EXCL and os.path.exists(path):
            raise FileExistsError(errno.EEXIST, "exists")
        fd = super().open(str(self._hidden / f"{len(self._open)}"), flags & ~os.O_EXCL)
        self._open[fd] = path
        return fd

    def close(self, fd: int) -> None:
        path = self._open.pop(fd)
        hidden = os.readlink(f"/proc/self/fd/{fd}")
        super().close(fd)
        if self.closes_fail:
            raise refusal(errno.EIO)
        os.rename(hidden, path)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        raise AssertionError("a bucket takes bytes one after the other")

    def fallocate(self, fd: int, size: int) -> None:
        raise AssertionError("a bucket has no fallocate")

    def rename(self, source: str, target: str) -> None:
        raise AssertionError("a bucket has no rename")

    def fsync(self, fd: int) -> None:
        raise AssertionError("a bucket finishes a file at its close alone")
