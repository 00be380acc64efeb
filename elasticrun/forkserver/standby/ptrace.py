"""ptrace(2) and the memory of another process, as far as the tracer needs them."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

_SEIZE, _INTERRUPT, _LISTEN, _DETACH, _RESUME = 0x4206, 0x4207, 0x4208, 17, 24
_SYSCALL_INFO: Final = 0x420E

_GOOD, _FORK, _VFORK, _CLONE, _EXEC, _EXITKILL = 1, 2, 4, 8, 16, 0x100000
_OPTIONS: Final = _GOOD | _FORK | _VFORK | _CLONE | _EXEC | _EXITKILL

WAIT_ALL: Final = 0x40000000
"""__WALL: also wait for threads."""

SYSCALL_STOP: Final = int(signal.SIGTRAP) | 0x80
EVENT_STOP: Final = 128
STOPPING: Final = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.process_vm_readv.restype = ctypes.c_ssize_t

_INFO: Final = struct.Struct("=B3xIQQQ6Q")
"""struct ptrace_syscall_info at an entry: kind, architecture, ip, sp, number, arguments."""

_PAGE: Final = 4096


class _Span(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _ptrace(request: int, tid: int, address: int | None = None, data: object = None) -> int:
    result: int = _libc.ptrace(request, tid, address, data)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


@dataclass(frozen=True, slots=True)
class SystemCall:
    """A system call that a thread is about to make."""

    architecture: int
    number: int
    arguments: tuple[int, ...]


def seize(tid: int) -> None:
    """Trace a process from now on, with the threads that it starts; they die with this process.
    Raises OSError if the system does not allow it."""
    _ptrace(_SEIZE, tid, None, _OPTIONS)


def interrupt(tid: int) -> None:
    """Stop a thread; a stop follows. Raises OSError."""
    _ptrace(_INTERRUPT, tid)


def listen(tid: int) -> None:
    """Leave a thread stopped by a signal (SIGSTOP) until SIGCONT."""
    _ptrace(_LISTEN, tid)


def resume(tid: int, signum: int = 0) -> None:
    """Continue a stopped thread up to its next system call, with this signal."""
    _ptrace(_RESUME, tid, None, signum)


def detach(tid: int, signum: int = 0) -> None:
    """Continue a stopped thread, no longer traced."""
    _ptrace(_DETACH, tid, None, signum)


_buffer: Final = ctypes.create_string_buffer(_INFO.size)


def entry(tid: int) -> SystemCall | None:
    """The system call that a thread in a syscall stop enters; None if it leaves one."""
    size = _ptrace(_SYSCALL_INFO, tid, _INFO.size, ctypes.addressof(_buffer))
    if _buffer.raw[0] != 1 or size < _INFO.size:
        return None
    _, architecture, _, _, number, *arguments = _INFO.unpack(_buffer.raw)
    return SystemCall(architecture, number, tuple(arguments))


def read(pid: int, address: int, length: int) -> bytes:
    """Bytes of a process's memory. Raises OSError."""
    room = ctypes.create_string_buffer(length)
    here, there = _Span(ctypes.addressof(room), length), _Span(address, length)
    got = _libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    if got < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return room.raw[:got]


def text(pid: int, address: int) -> bytes:
    """A string that ends with NUL. Raises OSError."""
    found = b""
    while len(found) <= _PAGE:
        size = _PAGE - (address + len(found)) % _PAGE  # the next page may not exist
        found += read(pid, address + len(found), size)
        if (end := found.find(b"\0")) >= 0:
            return found[:end]
    raise OSError("a path is longer than PATH_MAX")


def is_private(pid: int, address: int) -> bool:
    """Whether this memory of a process is its own and may be written. Raises OSError."""
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            place, rights, _ = line.split(maxsplit=2)
            first, end = (int(each, 16) for each in place.split("-"))
            if first <= address < end:
                return rights[1] == "w" and rights[3] == "p"
    return False


def write(pid: int, places: Iterable[tuple[int, int]]) -> None:
    """Write 64-bit words to these addresses of a traced process. Raises OSError."""
    memory = os.open(f"/proc/{pid}/mem", os.O_WRONLY | os.O_CLOEXEC)
    try:
        for address, word in places:
            os.pwrite(memory, word.to_bytes(8, "little"), address)
    finally:
        os.close(memory)
