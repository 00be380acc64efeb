"""Where a master keeps its record: a folder on a disk of this very host, of a launch or of a job.

A hosted master's folder belongs to the launch of its agent. Agent and master hold a shared lock on
it for as long as they live; whoever ends last removes it, and a folder that nobody holds is stale
and is removed by whoever finds it. A folder that a person named (`elasticrun master --state-dir`)
stays; there the lock is the master's alone, so that no two masters write one record.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from elasticrun.wire.published import run_folder

PREFIX: Final = "elasticrun-record-"
"""How the folders of launches are called; the rest of the name is random."""

MAX_SWEPT: Final = 256
"""Folders looked at in one sweep."""

ROOM: Final = 1024 * 1024
"""Bytes that must be free where a record is begun; it stays below that for 1,000 nodes."""

MAX_TRIES: Final = 8
"""New folders that a sweep may remove before we have locked one."""

SHARED_MEMORY: Final = "/dev/shm"
"""The last resort: it is on this host for certain, but may be small."""

NETWORK_FILE_SYSTEMS: Final[Mapping[int, str]] = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFE534D42: "SMB",
    0xFF534D42: "CIFS",
    0x65735546: "FUSE",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x01021997: "9p",
    0x00C36400: "CephFS",
    0x19830326: "BeeGFS",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x73757245: "Coda",
    0x7461636F: "OCFS2",
    0x01161970: "GFS2",
    0xAAD7AAEA: "PanFS",
    0x20030528: "OrangeFS",
    0xBACBACBC: "VMware's shared folders",
    0x786F4256: "VirtualBox's shared folders",
}
"""f_type of statfs(2), from its manual page, <linux/magic.h> and the clients' sources. SQLite's
write-ahead log needs shared memory between its users, which none of these give over hosts; of
what may lie behind FUSE nothing is known."""


class Unusable(OSError):
    """A folder cannot hold a record; the text is a sentence."""


def network_file_system(folder: Path) -> str:
    """The name of the network file system that `folder` stands on, "" for one of this host's.
    OSError if the folder cannot be asked."""
    kind = _file_system_type(folder)
    return NETWORK_FILE_SYSTEMS.get(kind & 0xFFFFFFFF, "")


def _file_system_type(folder: Path) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    answer = ctypes.create_string_buffer(512)  # struct statfs has 120 bytes, and begins with f_type
    if libc.statfs(os.fsencode(folder), answer):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), str(folder))
    return int.from_bytes(answer.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder)


# ---------------------------------------------------------------- the folder of a launch


@dataclass
class LaunchFolder:
    """A folder that this process holds."""

    path: Path
    fd: int

    def release(self) -> None:
        """Let go of it; others may hold it yet."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def remove(self) -> None:
        """Remove it with all that it holds, and let go."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()


def make(environ: Mapping[str, str]) -> LaunchFolder:
    """A new private folder, locked, in the user's run folder or, where that is no disk of this host
    or full, in $TMPDIR or shared memory. Unusable, with a sentence, if there is no such place."""
    reasons = []
    for place in _places(environ):
        try:
            _check(place)
            return _make_in(place)
        except OSError as wrong:
            reasons.append(str(wrong) if isinstance(wrong, Unusable) else f"{place}: {wrong}")
    raise Unusable("; ".join(reasons) or "this user has no folder on this host")


def sweep(environ: Mapping[str, str]) -> int:
    """Remove folders of launches of which no process lives; how many those were."""
    swept = 0
    for place in _places(environ):
        with contextlib.suppress(OSError):
            for path in sorted(place.glob(f"{PREFIX}*"))[:MAX_SWEPT]:
                swept += _remove_if_stale(path)
    return swept


def hold(path: Path, *, alone: bool = False) -> int:
    """A descriptor that holds this folder until it is closed or this process ends; `alone`: it must
    not be held by anybody else, BlockingIOError if it is. OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _places(environ: Mapping[str, str]) -> Iterator[Path]:
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: nobody knows our home
        yield run_folder(environ)
    with contextlib.suppress(OSError):
        yield Path(tempfile.gettempdir())
    if os.path.isdir(SHARED_MEMORY):
        yield Path(SHARED_MEMORY)


def _check(place: Path) -> None:
    network = network_file_system(place)
    if network:
        raise Unusable(f"{place} is on a network file system ({network})")
    room = os.statvfs(place)
    if room.f_bavail * room.f_frsize < ROOM:
        raise Unusable(f"{place} is full")


def _make_in(place: Path) -> LaunchFolder:
    for _ in range(MAX_TRIES):
        path = place / f"{PREFIX}{secrets.token_hex(8)}"
        path.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError, BlockingIOError):  # a sweep was faster
            fd = hold(path)
            try:
                os.stat(path)
            except FileNotFoundError:
                os.close(fd)
                raise
            return LaunchFolder(path, fd)
    raise Unusable(f"{place}: what is made there is removed at once")


def _remove_if_stale(path: Path) -> bool:
    try:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
        fd = hold(path, alone=True)
    except OSError:
        return False
    LaunchFolder(path, fd).remove()
    return True


# ---------------------------------------------------------------- a folder that a person named


def prepare(path: Path) -> None:
    """Make a named folder fit for a record. Unusable with a sentence if it cannot be."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        network = network_file_system(path)
    except OSError as wrong:
        raise Unusable(f"{path} cannot be used: {wrong.strerror or wrong}") from None
    if network:
        raise Unusable(
            f"{path} is on a network file system ({network}), on which the record could be torn; "
            "name a folder on a disk of this host"
        )
    try:
        probe = path / f"{PREFIX}{secrets.token_hex(8)}"
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        probe.unlink()
    except OSError as wrong:
        raise Unusable(f"{path} cannot be written to: {wrong.strerror or wrong}") from None
    _check(path)
