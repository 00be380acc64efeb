"""Sets the command line and the environment that `ps` and psutil show for this process."""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Sequence
from typing import Any, Final

from elasticrun.host.system.processes import stat_fields

FORK_SERVER: Final = b"elasticrun: fork server"
MASTER: Final = "elasticrun: master of {}"
AGENT: Final = b"elasticrun: agent"
"""Title of an agent that the Python API started; one that a user started keeps its command line."""

_PR_SET_MM = 35
_PR_SET_MM_MAP = 14

_NO_FILE = 0xFFFFFFFF

_libc = ctypes.CDLL(None, use_errno=True)
_libc.sbrk.restype = ctypes.c_void_p
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]


_AREAS: Final = (
    *("start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack"),
    *("arg_start", "arg_end", "env_start", "env_end"),
)


class _MemoryMap(ctypes.Structure):
    """struct prctl_mm_map of <linux/prctl.h>."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in _AREAS),
        ("auxv", ctypes.c_uint64),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


def set_command_line(argv: Sequence[bytes], environ: Sequence[bytes] | None = None) -> bool:
    """Show `argv` and `environ` in /proc/self/cmdline and /proc/self/environ; None: leave the
    environment as it is.

    Sets the addresses of the two areas in the kernel (unprivileged since Linux 3.18 with
    CONFIG_CHECKPOINT_RESTORE, which distributions have). If the kernel refuses, writes `argv` over
    the old command line as one title, cut to that length, and returns False.
    """
    return bool(_set_areas(_strings(argv), None if environ is None else _strings(environ)))


def become_program(argv: Sequence[bytes], environ: Sequence[bytes]) -> bool:
    """Like `set_command_line`, and C code of this process finds `environ` where the kernel puts it
    at an exec: right after the words. Code that sets a title (setproctitle) looks for the words
    there and overwrites both. Returns False if the kernel refuses; then such code cannot set a
    title."""
    words = _strings(argv)
    at = _set_areas(words, _strings(environ))
    if not at:
        return False
    pointers, where = [], at + len(words)
    for each in environ:
        pointers.append(where)
        where += len(each) + 1
    array = struct.pack(f"{len(pointers) + 1}P", *pointers, 0)
    ctypes.c_void_p.in_dll(_libc, "environ").value = _permanent_copy(array)
    return True


def set_title(title: bytes) -> None:
    """Show `title` as the command line of this process, for processes of ours that were not started
    by a user. Leaves the environment as it is."""
    _set_areas(title + b"\0", None)


def _strings(words: Sequence[bytes]) -> bytes:
    return b"".join(word + b"\0" for word in words)


def _set_areas(arguments: bytes, environ: bytes | None) -> int:
    """Show both areas; returns the address of `arguments`, which `environ` directly follows. If the
    kernel refuses, writes `arguments` over the old command line and returns 0."""
    # keyed by their numbers in proc(5)
    fields = {number: int(word) for number, word in enumerate(stat_fields("self")[1:], start=4)}
    at = _permanent_copy(arguments + (environ or b""))
    behind = at + len(arguments)
    variables = (fields[50], fields[51]) if environ is None else (behind, behind + len(environ))
    if _set_addresses(fields, (at, behind), variables):
        return at
    _libc.free(at)
    first, room = fields[48], fields[49] - fields[48]
    title = arguments[:-1].replace(b"\0", b" ")
    if first and room > 1:  # a last byte other than NUL marks this as a title for the kernel
        ctypes.memmove(first, title[: room - 2].ljust(room - 1, b"\0") + b".", room)
    return 0


def _set_addresses(
    fields: dict[int, int], arguments: tuple[int, int], environ: tuple[int, int]
) -> bool:
    """Set the addresses of the two areas in the kernel; returns False if it refuses."""
    layout = _MemoryMap(
        start_code=fields[26],
        end_code=fields[27],
        start_data=fields[45],
        end_data=fields[46],
        start_brk=fields[47],
        brk=_libc.sbrk(0),
        start_stack=fields[28],
        arg_start=arguments[0],
        arg_end=arguments[1],
        env_start=environ[0],
        env_end=environ[1],
        exe_fd=_NO_FILE,
    )
    size = ctypes.c_ulong(ctypes.sizeof(layout))
    done: int = _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(layout), size, 0)
    return done == 0


def _permanent_copy(content: bytes) -> int:
    """The address of a copy that Python never frees, because C code may read it even while the
    interpreter exits."""
    at: int | None = _libc.malloc(len(content) or 1)
    if not at:
        raise MemoryError
    ctypes.memmove(at, content, len(content))
    return at


def clear_argc_argv() -> None:
    """Make Py_GetArgcArgv return no words in this process and its forks.

    Otherwise it returns the words with which this process was started, and code that sets a title
    in a fork (see `become_program`) would look for that many words. If there are none, that code
    counts the words in /proc/self/cmdline. The interpreter has no function for this, so its
    variables are searched for the pair that Py_GetArgcArgv returns. Nothing is changed unless the
    pair is found exactly once."""
    count, words = ctypes.c_int(), ctypes.c_void_p()
    find: Any = ctypes.pythonapi.Py_GetArgcArgv
    find(ctypes.byref(count), ctypes.byref(words))
    if not words.value:
        return
    pair = struct.pack("nP", count.value, words.value)
    places = []
    for start, size in _writable_memory_of(ctypes.cast(find, ctypes.c_void_p)):
        held, at = ctypes.string_at(start, size), -1
        while (at := held.find(pair, at + 1)) >= 0:
            places.append(start + at)
    if len(places) == 1:
        ctypes.c_ssize_t.from_address(places[0]).value = 0


_ELF = struct.Struct("=4sB27xQ14xHH")
"""Fields of an ELF header: magic, class, offset of the program headers, their size and number."""

_SEGMENT = struct.Struct("=IIQQQQQQ")
"""A program header: type, flags, offset, address, (unused), bytes in the file, bytes in memory,
(unused)."""

_LOADED, _WRITABLE, _64_BITS = 1, 2, 2


def _writable_memory_of(function: ctypes.c_void_p) -> list[tuple[int, int]]:
    """Addresses and sizes of the writable memory of the program or library that contains this
    function."""
    about = (ctypes.c_void_p * 4)()  # Dl_info
    base = about[1] if _libc.dladdr(function, about) else None
    if not base:
        return []
    magic, bits, offset, size, count = _ELF.unpack(ctypes.string_at(base, _ELF.size))
    if magic != b"\x7fELF" or bits != _64_BITS or size != _SEGMENT.size:
        return []
    headers = ctypes.string_at(base + offset, size * count)
    loaded = [each for each in _SEGMENT.iter_unpack(headers) if each[0] == _LOADED]
    shift = base - min(each[3] for each in loaded) // mmap.PAGESIZE * mmap.PAGESIZE
    return [(shift + each[3], each[6]) for each in loaded if each[1] & _WRITABLE]
