"""Measures, allocates, prefaults and maps shared memory.

Every function may block. `ftruncate` alone would succeed without free memory, and the first store
to a page would then kill the process (SIGBUS). So as many huge pages as possible are allocated
first, and the rest with `posix_fallocate`. The caller first compares with `available_memory`,
because a process that reaches its cgroup's limit is killed. Pages are zeroed, and possibly backed
by a hypervisor, at the first touch; MADV_POPULATE_WRITE touches them in advance, through ctypes,
because `mmap.madvise` holds the interpreter lock during the whole call.

A new rank maps its segment again. With pages of 4 KiB that costs about 80 ms per GiB before the
first byte is copied, and 40 ms when the rank exits. With pages of 2 MiB it costs almost nothing,
and the allocation takes a third of the time. The kernel maps huge pages as such only at addresses
that are multiples of 2 MiB, and does not choose such addresses by itself; `map_shared` does.
MADV_COLLAPSE (Linux 6.1) turns a stretch of 2 MiB with at least one page into a huge page,
regardless of the machine's settings for shared memory.
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
from elasticrun.snapshots.shm.throttle import Throttle

LARGE: Final = 2 * 1024 * 1024
"""Bytes of a huge page on x86 and most ARM machines. On machines with another size there are no
huge pages here."""

_MAP_NORESERVE, _MAP_FIXED = 0x4000, 0x10

_POPULATE_READ: Final = 22
"""MADV_POPULATE_READ, Linux 5.14. The pages of shared memory that it maps are writable too."""


def map_shared(fd: int, nbytes: int, *, writable: bool = True) -> ctypes.Array[ctypes.c_ubyte]:
    """Map the first `nbytes` of a file of shared memory; unmapped once the array and all views of
    it are freed. The caller keeps the descriptor. Raises OSError."""
    if nbytes <= 0:
        raise OSError(errno.EINVAL, "an empty file cannot be mapped")
    libc = c_library()
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
    # not at interpreter exit, when views may remain: the kernel unmaps it then
    weakref.finalize(array, libc.munmap, base, reserved).atexit = False
    return array


def map_pages(at: int, end: int) -> None:
    """Create the page table entries of all pages between two addresses at once. Otherwise the first
    access to each page is a fault, about 80 ms per GiB. A no-op on kernels that do not support
    it."""
    at -= at % mmap.PAGESIZE
    c_library().madvise(at, end - at, _POPULATE_READ)


def _checked(address: int | None) -> int:
    if address is None or address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address


@cache
def c_library() -> Any:
    """The C library's mmap, madvise and munmap; each releases the interpreter lock."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


MADV_COLLAPSE: Final = 25

MAX_FAILURES: Final = 16
"""Number of consecutive failures before giving up: memory is then fragmented, and the kernel needs
milliseconds per stretch to find that out.
"""


def allocate_huge_pages(fd: int, nbytes: int, throttle: Throttle) -> str:
    """Back the first `nbytes` of a file of shared memory with zeroed huge pages, as far as
    possible. Returns "" if at least one was available, or none was needed; else a clause that says
    why not. The other stretches have at most one page of 4 KiB each; the caller allocates them with
    posix_fallocate, which fails if memory is short."""
    size = nbytes // LARGE * LARGE
    if not size:
        return ""
    try:
        mapped = map_shared(fd, size)
    except OSError as error:
        return str(error.strerror)
    libc, begin = c_library(), ctypes.addressof(mapped)
    failed, made, why = 0, 0, ""
    for at in throttle.spread(range(0, size, LARGE)):
        try:
            os.pwrite(fd, b"\0", at)
        except OSError as error:  # no memory: posix_fallocate reports it
            return "" if made else str(error.strerror)
        if libc.madvise(begin + at, LARGE, MADV_COLLAPSE) == 0:
            failed, made = 0, made + 1
            continue
        number = ctypes.get_errno()
        why, failed = why or os.strerror(number), failed + 1
        if failed == MAX_FAILURES or number not in (errno.EAGAIN, errno.EBUSY):
            break
    return "" if made else why


Report = Callable[[str], None]

POPULATE_WRITE: Final = 23  # <linux/mman.h> MADV_POPULATE_WRITE, Linux 5.14

CHUNK: Final = 4 * 1024 * 1024
"""Bytes that are allocated, mapped or prefaulted at a time: a millisecond, or 20 where a hypervisor
provides the memory."""

RESERVE: Final = 64 * 1024 * 1024
"""Bytes of the machine's memory that are left to other processes."""

_CGROUPS: Final = Path("/sys/fs/cgroup")


class NoMemory(Exception):
    """The memory is not available; the text is a clause that says why."""


def size_text(count: int) -> str:
    """A number of bytes for people: `1.2 GiB`."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}"


# ---------------------------------------------------------------- how much is available


def available_in(folder: str) -> int:
    """Bytes available in the file system of `folder`. Raises OSError."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def available_memory() -> tuple[int, str]:
    """Bytes that this process may allocate without an OOM kill, and the limiting factor: the
    machine, or the cgroup. Huge if unknown."""
    room, bound = 1 << 62, "the machine"
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                room = max(0, int(line.split()[1]) * 1024 - RESERVE)
    for folder in _cgroup_folders():
        left = _bytes_left_in(folder)
        if left is not None and left < room:
            room, bound = left, f"the cgroup {folder}"
    return room, bound


def _cgroup_folders() -> list[Path]:
    """The folders with the limits of this process's cgroup and its parents (cgroup v1 and v2)."""
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


def _bytes_left_in(folder: Path) -> int | None:
    """Bytes left below the limit of one cgroup; reclaimable memory counts as free. None: it has no
    limit."""
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
        return max(0, int(text) - max(0, taken - _reclaimable(folder)))
    return None


def _reclaimable(folder: Path) -> int:
    """Bytes of a cgroup's page cache: file pages that are not shared memory."""
    stat: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, number = line.partition(" ")
            stat[name] = int(number)
    files = stat.get("file", stat.get("total_cache", 0))
    return max(0, files - stat.get("shmem", stat.get("total_shmem", 0)))


# ---------------------------------------------------------------- allocation


def _ignore(clause: str) -> None:
    """Ignore why there are no huge pages."""


def allocate_file(
    path: str, nbytes: int, filled: int, throttle: Throttle, report: Report = _ignore
) -> int:
    """Create a file of `nbytes` whose first `filled` bytes are allocated; returns its descriptor.
    `report` is called with a clause if no huge page was available. Raises NoMemory, also if the
    file exists; leaves no new file then."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        raise NoMemory(f"{path} cannot be created ({error.strerror})") from None
    try:
        _fill(fd, nbytes, filled, throttle, report)
    except BaseException:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    return fd


def allocate_anonymous(
    name: str, nbytes: int, filled: int, throttle: Throttle, report: Report = _ignore
) -> int:
    """The same as `allocate_file`, for an anonymous file that cannot be shrunk. Raises NoMemory."""
    try:
        fd = memory_file(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise NoMemory(f"the kernel refuses an anonymous file ({error.strerror})") from None
    try:
        _fill(fd, nbytes, filled, throttle, report)
    except BaseException:
        os.close(fd)
        raise
    with contextlib.suppress(OSError):  # forbid truncation; files of a path cannot be sealed
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def _fill(fd: int, nbytes: int, filled: int, throttle: Throttle, report: Report) -> None:
    try:
        os.ftruncate(fd, nbytes)
        if why := allocate_huge_pages(fd, filled, throttle):
            report(why)
        for at in throttle.spread(range(0, filled, CHUNK)):
            os.posix_fallocate(fd, at, min(CHUNK, filled - at))
    except OSError as error:
        raise NoMemory(f"{size_text(filled)} could not be allocated ({error.strerror})") from None


def map_allocated(fd: int, nbytes: int, path: str) -> mmap.mmap:
    """Map memory that was just allocated. If that fails, frees it and raises NoMemory: mappings
    have separate limits (ulimit -v, vm.max_map_count). `path`: the file to remove, "" for none."""
    try:
        return mmap.mmap(fd, nbytes)
    except OSError as error:
        os.close(fd)
        if path:
            with contextlib.suppress(OSError):
                os.unlink(path)
        why = f"{error.strerror}; see ulimit -v and vm.max_map_count"
        raise NoMemory(f"the agent cannot map {size_text(nbytes)} ({why})") from None


# ---------------------------------------------------------------- prefaulting


def populate(fd: int, nbytes: int, throttle: Throttle) -> bool:
    """Touch every page, so that it is allocated, without the interpreter lock; False if that fails,
    as on older kernels. Removes its mappings again, because page tables are per process."""
    libc = c_library()
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    for at in throttle.spread(range(0, nbytes, CHUNK)):
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
