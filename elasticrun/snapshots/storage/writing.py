"""Writes a file durably to a disk, with a clear message for each failure.

It allocates all space first (`fallocate`, so that a full disk is detected before hours of work),
bypasses the page cache (O_DIRECT from page-aligned memory), then calls fsync. A feature that the
file system refuses is reported once and not used again. gcsfuse is recognized in the mount table;
it permits only one sequential writer, no rename, and no reading back. There, a file exists once
`close` has succeeded, so an error of `close` is an error of the file.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

_LIBC: Final = ctypes.CDLL(None, use_errno=True)

GCSFUSE: Final = "fuse.gcsfuse"
"""The file system's type in the mount table."""

PAGE: Final = 4096
PIECE: Final = 8 * 1024 * 1024
"""Bytes of one write: larger ones were not faster on a local disk, smaller ones slower."""

_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
"""Flags for a new file. O_TRUNC, because a repeated attempt replaces the file that its killed saver
left."""

REFUSED: Final = frozenset(
    {errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS, errno.EPERM}
)
"""Errors by which a file system reports that it lacks a feature, rather than a failure."""

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class StorageError(Exception):
    """Storage failed. The message names the file and what to do."""


def sentence(error: OSError, path: str, doing: str, free: int | None = None) -> str:
    """A sentence about an error. `doing`: written, read, removed, listed...; `free`: bytes
    available where `path` is."""
    if error.errno in _FULL:
        left = "" if free is None else f" ({free / 2**30:.2f} GiB available)"
        what = "the quota is used up" if error.errno == errno.EDQUOT else "the disk is full"
        return f"{path} was not {doing}: {what}{left}; free some space, or choose another folder"
    return f"{path} was not {doing}: {error.strerror or error}"


class Calls:
    """The system calls in one object, so that tests can make some fail. Each raises OSError."""

    pwrite = staticmethod(os.pwrite)
    write = staticmethod(os.write)
    fsync = staticmethod(os.fsync)
    close = staticmethod(os.close)
    rename = staticmethod(os.rename)
    mkdir = staticmethod(os.mkdir)
    unlink = staticmethod(os.unlink)
    remove = staticmethod(shutil.rmtree)
    """Removes a folder with its content; does not follow links."""

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o666)

    def fallocate(self, fd: int, size: int) -> None:
        """Linux's fallocate. Not posix_fallocate, which C libraries emulate on file systems without
        it by writing to every block; that takes hours over a network."""
        call = getattr(_LIBC, "fallocate64", _LIBC.fallocate)
        while call(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
            number = ctypes.get_errno()
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number))

    def cached(self, fd: int) -> None:
        """Turn O_DIRECT off: later writes use the page cache."""
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)

    def drop(self, fd: int) -> None:
        """Drop the file's written data from the page cache."""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def mounts(self) -> str:
        return Path("/proc/self/mounts").read_text(errors="surrogateescape")


def is_gcsfuse(path: str, mounts: str) -> bool:
    """Whether `path` (absolute, resolved) is on a bucket mounted by gcsfuse."""
    deepest, kind = "", ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ").rstrip("/")
        if (path == point or path.startswith(point + "/")) and len(point) >= len(deepest):
            deepest, kind = point, fields[2]
    return kind == GCSFUSE


class Sink(Protocol):
    """A file that is written from its first byte to its last."""

    def write(self, data: memoryview) -> None:
        """Write the next bytes. Raises StorageError."""

    def close(self) -> None:
        """Close; the file is on stable storage when this returns. Raises StorageError."""

    def abort(self) -> None:
        """Remove what has been written; never raises."""


@dataclass
class Features:
    """The features that a file system has not refused so far, and remarks about refused ones."""

    calls: Calls
    direct: bool = True
    fallocate: bool = True
    rename: bool = True
    fsync: bool = True
    remarks: list[str] = field(default_factory=list)

    def disable(self, feature: str, path: str, error: OSError, instead: str) -> None:
        """Turn off a feature that the file system has refused with `error`, and add a remark;
        `instead`: the consequence. Any other error is raised."""
        if error.errno not in REFUSED:
            raise error
        setattr(self, feature, False)
        name = {"direct": "O_DIRECT"}.get(feature, feature)
        where = os.path.dirname(path)
        self.remarks.append(
            f"the file system of {where} has no {name} ({error.strerror}): {instead}"
        )


def features_of(root: str, calls: Calls, remarks: list[str] | None = None) -> Features:
    """The features of the file system that contains `root`, an absolute path that need not exist
    yet. Resolves the path, which blocks if a file system on the way hangs. `remarks`: the list to
    which remarks are appended."""
    found = Features(calls, remarks=[] if remarks is None else remarks)
    with suppress(OSError):
        if is_gcsfuse(os.path.realpath(root), calls.mounts()):
            found.direct = found.fallocate = found.rename = found.fsync = False
    return found


class FileSink:
    """A file on a local or mounted file system; see Sink. `size`: its size in bytes if known in
    advance, else 0."""

    def __init__(self, features: Features, path: str, size: int, flags: int = _NEW) -> None:
        """Create the file. Raises StorageError; FileExistsError if `flags` has O_EXCL."""
        self._features, self._calls, self._path = features, features.calls, path
        self._at = 0
        self._direct = features.direct and size >= PAGE
        self._fd = -1
        try:
            if self._direct:
                try:
                    self._fd = self._calls.open(path, flags | os.O_DIRECT)
                except OSError as error:
                    self._disable_direct(error)
            if self._fd < 0:
                self._fd = self._calls.open(path, flags)
            if features.fallocate and size:
                try:
                    self._calls.fallocate(self._fd, size)
                except OSError as error:
                    features.disable("fallocate", path, error, "a full disk is detected late")
        except FileExistsError:
            raise
        except OSError as error:
            self._fail(error)

    def _disable_direct(self, error: OSError) -> None:
        instead = "files are written through the page cache"
        self._features.disable("direct", self._path, error, instead)
        self._direct = False

    def write(self, data: memoryview) -> None:
        """See Sink.write. For O_DIRECT, `data` must be page-aligned in memory and in length, except
        the last piece; otherwise the page cache is used from then on."""
        at = 0
        try:
            while at < len(data):
                took = self._write_some(data[at : at + PIECE])
                if took < 1:  # would loop forever
                    raise OSError(errno.EIO, "a write accepted no bytes")
                at += took
        except OSError as error:
            self._fail(error)

    def _write_some(self, piece: memoryview) -> int:
        whole = len(piece) // PAGE * PAGE
        if self._direct and (self._at % PAGE or not whole):
            self._calls.cached(self._fd)  # the unaligned end of a file
            self._direct = False
        try:
            took = self._write_once(piece[:whole] if self._direct else piece)
        except OSError as error:
            if not self._direct:
                raise
            self._disable_direct(error)
            self._calls.cached(self._fd)
            took = self._write_once(piece)
        self._at += took
        return took

    def _write_once(self, piece: memoryview) -> int:
        if self._features.fsync:
            return self._calls.pwrite(self._fd, piece, self._at)
        return self._calls.write(self._fd, piece)

    def close(self, *, drop: bool = True) -> None:
        """See Sink.close. `drop`: also drop the file from the page cache, because it will not be
        read soon."""
        try:
            if self._features.fsync:
                self._calls.fsync(self._fd)
            if self._features.fsync and drop:
                with suppress(OSError):
                    self._calls.drop(self._fd)
            fd, self._fd = self._fd, -1
            self._calls.close(fd)
        except OSError as error:
            self._fail(error)

    def abort(self) -> None:
        fd, self._fd = self._fd, -1
        with suppress(OSError):
            if fd >= 0:
                self._calls.close(fd)
        with suppress(OSError):
            os.unlink(self._path)

    def _fail(self, error: OSError) -> None:
        free = free_bytes(os.path.dirname(self._path))
        self.abort()
        raise StorageError(sentence(error, self._path, "written", free)) from error


def write_small(features: Features, path: str, data: bytes) -> None:
    """Replace a small file atomically: a reader sees either all of the old content or all of the
    new content. Raises StorageError.

    On a file system without rename that holds only if a file appears with its `close`; otherwise a
    reader may see a partial file, which its checksum reveals."""
    if features.rename:
        draft = f"{path}.{secrets.token_hex(4)}.tmp"
        _write_all(features, draft, data, _NEW | os.O_EXCL)
        try:
            features.calls.rename(draft, path)
            sync_folder(features, os.path.dirname(path))
            return
        except OSError as error:
            with suppress(OSError):
                os.unlink(draft)
            if error.errno not in REFUSED:
                raise StorageError(sentence(error, path, "written")) from error
            features.disable("rename", path, error, "small files are overwritten in place")
    _write_all(features, path, data, _NEW)
    sync_folder(features, os.path.dirname(path))


def write_first(features: Features, path: str, data: bytes) -> bool:
    """Create a small file unless it exists; False if it does. Raises StorageError."""
    try:
        _write_all(features, path, data, _NEW | os.O_EXCL)
    except FileExistsError:
        return False
    sync_folder(features, os.path.dirname(path))
    return True


def _write_all(features: Features, path: str, data: bytes, flags: int) -> None:
    """Write a whole file and sync it. Raises StorageError; FileExistsError if `flags` has
    O_EXCL."""
    sink = FileSink(features, path, 0, flags)
    sink.write(memoryview(data))
    sink.close(drop=False)


def sync_folder(features: Features, path: str) -> None:
    """Make the names in a folder durable, so that they survive a power failure. A no-op on file
    systems that cannot sync a folder, which keep names anyway. Raises StorageError."""
    if not features.fsync:
        return
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            features.calls.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in REFUSED:
            raise StorageError(sentence(error, path, "synced to disk")) from error


def free_bytes(path: str) -> int | None:
    """Bytes available to this user where `path` is; None if unknown."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
