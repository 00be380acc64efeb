"""Shared memory by the page: how much may be had, taking it, making it warm, and mapping it.

All of it blocks. `ftruncate` alone would succeed where there is no room, and the first store into
the page would end the process that makes it (SIGBUS); so pages are taken by `posix_fallocate`,
after as many large ones as there are. A limit of the cgroup is looked at before, since reaching it
kills somebody. And pages that nobody has touched are zeroed, and perhaps given by a hypervisor, at
the first touch: MADV_POPULATE_WRITE touches them beforehand, by ctypes, because `mmap.madvise`
would hold the interpreter for the whole call.

A rank that is born maps its segment anew. In pages of 4 KiB that costs some 80 ms a GiB before the
first byte is copied, and 40 ms when the rank dies; in pages of 2 MiB next to nothing, and the pages
themselves are had in a third of the time. The kernel maps large pages as such at addresses that are
multiples of 2 MiB alone, and does not look for one by itself: `map_shared` does. MADV_COLLAPSE
(Linux 6.1) makes one of a stretch of 2 MiB that has at least one page, whatever the machine's
settings for shared memory say.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

from elasticrun.host.system.processes import memory_file

LARGE: Final = 2 * 1024 * 1024
"""Bytes of a large page on x86 and of most ARM machines. Where it is another, there are none."""

_MAP_NORESERVE, _MAP_FIXED = 0x4000, 0x10

_POPULATE_READ: Final = 22
"""MADV_POPULATE_READ, Linux 5.14. Of shared memory, pages that it maps are writable as well."""


def map_shared(fd: int, nbytes: int, *, writable: bool = True) -> ctypes.Array[ctypes.c_ubyte]:
    """The first `nbytes` of a file of shared memory, mapped until nobody has the array or a view of
    it any more. The descriptor stays the caller's. OSError."""
    if nbytes <= 0:
        raise OSError(errno.EINVAL, "nothing can be mapped of an empty file")
    libc = system()
    reserved = nbytes + LARGE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    base = _checked(libc.mmap(None, reserved, 0, flags, -1, 0))
    at = -(-base // LARGE) * LARGE
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    try:
        _checked(libc.mmap(at, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0))
    except OSError:
        libc.munmap(base, reserved)
        raise
    array = (ctypes.c_ubyte * nbytes).from_address(at)
    # not at the interpreter's end, when others may still look at it; the kernel does it then
    weakref.finalize(array, libc.munmap, base, reserved).atexit = False
    return array


def map_pages(at: int, end: int) -> None:
    """Make the entries of all pages between two addresses at once: a new mapping of warm pages
    costs a fault for each else, some 80 ms a GiB. An older kernel does not know how; then the
    first access does it."""
    at -= at % mmap.PAGESIZE
    system().madvise(at, end - at, _POPULATE_READ)


def _checked(address: int | None) -> int:
    if address is None or address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address


@cache
def system() -> Any:
    """The C library's mmap, madvise and munmap; each lets go of the interpreter meanwhile."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


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
    libc, begin = system(), ctypes.addressof(mapped)
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
        fd = memory_file(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise NoRoom(f"the kernel gives no memory without a file ({error.strerror})") from None
    try:
        _fill(fd, nbytes, filled, tell)
    except BaseException:
        os.close(fd)
        raise
    with contextlib.suppress(OSError):  # nobody can cut it any more; files cannot be sealed
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def _fill(fd: int, nbytes: int, filled: int, tell: Tell) -> None:
    try:
        os.ftruncate(fd, nbytes)
        if why := take(fd, filled):
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
        try:
            address = _checked(libc.mmap(None, length, protection, mmap.MAP_SHARED, fd, at))
        except OSError:
            return False
        good = libc.madvise(address, length, POPULATE_WRITE) == 0
        libc.munmap(address, length)
        if not good:
            return False
    return True
