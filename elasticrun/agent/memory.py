"""Shared memory by the page: how much may be had, taking it, and making it warm. All of it blocks.

`ftruncate` alone would succeed where there is no room, and the first store into the page would end
the process that makes it (SIGBUS); so pages are taken by `posix_fallocate`, after as many large
ones as there are (`large_pages`). A limit of the cgroup is looked at before, since reaching it
kills somebody. And pages that nobody has touched are zeroed, and perhaps given by a hypervisor, at
the first touch: MADV_POPULATE_WRITE touches them beforehand, by ctypes, because `mmap.madvise`
would hold the interpreter for the whole call (checkpointing 2.3).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from elasticrun.agent import large_pages
from elasticrun.wire.mapping import system

Tell = Callable[[str], None]

POPULATE_WRITE: Final = 23  # <linux/mman.h> MADV_POPULATE_WRITE, Linux 5.14

CHUNK: Final = 64 * 1024 * 1024
"""Bytes that are made warm with one call, so that a segment that is dropped meanwhile costs little
more."""

RESERVE: Final = 64 * 1024 * 1024
"""Bytes of the machine's memory that are left to others."""

_CGROUPS: Final = Path("/sys/fs/cgroup")


class NoRoom(Exception):
    """The memory cannot be had; a clause that says where there was too little."""


def in_words(count: int) -> str:
    """`1.2 GiB`."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}"


# ---------------------------------------------------------------- how much there is


def room_in(folder: str) -> int:
    """Bytes that the file system of `folder` has left. OSError."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def room_in_memory() -> tuple[int, str]:
    """Bytes that this process may take without somebody being killed for it, and what bounds them:
    the machine, or the cgroup. Huge where nothing tells."""
    room, bound = 1 << 62, "the machine"
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                room = max(0, int(line.split()[1]) * 1024 - RESERVE)
    for folder in _cgroup_folders():
        left = _left_in(folder)
        if left is not None and left < room:
            room, bound = left, f"the cgroup {folder}"
    return room, bound


def _cgroup_folders() -> list[Path]:
    """Where the limits of this process' cgroup stand, with those above it (both versions)."""
    found: list[Path] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root = _CGROUPS if not controllers else _CGROUPS / "memory"
            folder = root / path.lstrip("/")
            while folder != root.parent and len(found) < 64:
                found.append(folder)
                folder = folder.parent
    return found


def _left_in(folder: Path) -> int | None:
    """Bytes up to the limit of one cgroup, what it could give back counted; None: no limit."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            text = (folder / limit).read_text().strip()
            if text == "max" or int(text) >= 1 << 60:
                return None
            taken = int((folder / used).read_text())
        except (OSError, ValueError):
            continue
        return max(0, int(text) - max(0, taken - _can_go(folder)))
    return None


def _can_go(folder: Path) -> int:
    """Bytes of page cache: all that is of files but not of shared memory."""
    stat: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, number = line.partition(" ")
            stat[name] = int(number)
    files = stat.get("file", stat.get("total_cache", 0))
    return max(0, files - stat.get("shmem", stat.get("total_shmem", 0)))


# ---------------------------------------------------------------- taking it


def _nobody(clause: str) -> None:
    """Who need not know why there are no large pages."""


def take_file(path: str, nbytes: int, filled: int, tell: Tell = _nobody) -> int:
    """A descriptor of a new file of `nbytes`, whose first `filled` bytes have their pages; `tell`
    is called with a clause if no large ones could be had. NoRoom, and then there is no file."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        raise NoRoom(f"{path} cannot be made ({error.strerror})") from None
    try:
        _fill(fd, nbytes, filled, tell)
    except BaseException:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    return fd


def take_anonymous(name: str, nbytes: int, filled: int, tell: Tell = _nobody) -> int:
    """The same without a file. NoRoom."""
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
    except OSError as error:
        raise NoRoom(f"the kernel gives no memory without a file ({error.strerror})") from None
    try:
        _fill(fd, nbytes, filled, tell)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _fill(fd: int, nbytes: int, filled: int, tell: Tell) -> None:
    try:
        os.ftruncate(fd, nbytes)
        if why := large_pages.take(fd, filled):
            tell(why)
        os.posix_fallocate(fd, 0, filled)
    except OSError as error:
        raise NoRoom(f"{in_words(filled)} could not be taken ({error.strerror})") from None


def mapped(fd: int, nbytes: int, path: str) -> mmap.mmap:
    """What was just taken, mapped. NoRoom, and then it is given back: what this process may map has
    limits of its own (ulimit -v, vm.max_map_count)."""
    try:
        return mmap.mmap(fd, nbytes)
    except OSError as error:
        os.close(fd)
        if path:
            with contextlib.suppress(OSError):
                os.unlink(path)
        why = f"{error.strerror}; see ulimit -v and vm.max_map_count"
        raise NoRoom(f"the agent cannot map {in_words(nbytes)} ({why})") from None


# ---------------------------------------------------------------- making it warm


def populate(fd: int, nbytes: int) -> bool:
    """Touch every page, without the interpreter's lock; false where the kernel cannot be asked to.
    The mapping is gone again afterwards: page tables are each process' own."""
    libc = system()
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    for at in range(0, nbytes, CHUNK):
        length = min(CHUNK, nbytes - at)
        address = libc.mmap(None, length, protection, mmap.MAP_SHARED, fd, at)
        if address is None or address == ctypes.c_void_p(-1).value:
            return False
        good = libc.madvise(address, length, POPULATE_WRITE) == 0
        libc.munmap(address, length)
        if not good:
            return False
    return True
