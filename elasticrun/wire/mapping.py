"""How a process maps a segment: so that pages of 2 MiB, where the memory is in such, are mapped as
such. The kernel does that at addresses which are multiples of 2 MiB alone, and does not look for
one by itself. Then a mapping costs next to nothing to be made and to be given back; in pages of
4 KiB it is some 80 ms and 40 ms a GiB (agent.large_pages).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from functools import cache
from typing import Any, Final

LARGE: Final = 2 * 1024 * 1024
"""Bytes of a large page on x86 and of most ARM machines. Where it is another, there are none."""

_MAP_NORESERVE, _MAP_FIXED = 0x4000, 0x10


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
