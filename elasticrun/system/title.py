"""What `ps -ef` and psutil show of a process: its command line, and its variables."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Final

from elasticrun.system.processes import stat_fields

FORK_SERVER: Final = b"elasticrun: fork server"
MASTER: Final = "elasticrun: master of {}"
AGENT: Final = b"elasticrun: agent"
"""Of a caller of the Python API; an agent that a user has started keeps what was typed."""

_PR_SET_MM = 35
_PR_SET_MM_MAP = 14

_NO_FILE = 0xFFFFFFFF

_libc = ctypes.CDLL(None, use_errno=True)
_libc.sbrk.restype = ctypes.c_void_p


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


_kept: list[mmap.mmap] = []
"""The pages that /proc/self/cmdline and environ are read from; never freed."""

_first: list[tuple[int, int]] = []
"""Where the words lay when this process, or the one that it was forked from, was exec'd."""


def set_command_line(argv: Sequence[bytes], environ: Sequence[bytes]) -> bool:
    """Show `argv` and `environ` as ours in /proc/self/cmdline and /proc/self/environ.

    The kernel is told where the two areas lie (no privilege needed since Linux 3.18 with
    CONFIG_CHECKPOINT_RESTORE, which distributions have): the words where those of the exec were if
    they fit, since programs that set a title write there, else in new pages; the environment in new
    pages. Where the kernel refuses, the words are written over the old ones as one title, cut to
    their length. False for the latter.
    """
    variables = b"".join(word + b"\0" for word in environ)
    at = _in_pages(variables)
    return _show(b"".join(word + b"\0" for word in argv), (at, at + len(variables)))


def set_title(title: bytes) -> None:
    """Show `title` as our command line, and our environment as before: for processes of ours, in
    the place of what they were started or forked from."""
    _show(title + b"\0", None)


def _show(arguments: bytes, environ: tuple[int, int] | None) -> bool:
    # by their numbers in proc(5)
    fields = {number: int(word) for number, word in enumerate(stat_fields("self")[1:], start=4)}
    if not _first:
        _first.append((fields[48], fields[49]))
    first, last = _first[0]
    room = last - first
    fits = bool(first) and len(arguments) <= room
    start = first if fits else _in_pages(arguments)
    areas = (start, start + len(arguments)), environ or (fields[50], fields[51])
    if _lay_out(fields, *areas):
        if fits:
            ctypes.memmove(first, arguments.ljust(room, b"\0"), room)
        return True
    title = arguments[:-1].replace(b"\0", b" ")
    if first and room > 1:  # a last byte that is not NUL tells the kernel that this is a title
        ctypes.memmove(first, title[: room - 2].ljust(room - 1, b"\0") + b".", room)
    return False


def _lay_out(fields: dict[int, int], arguments: tuple[int, int], environ: tuple[int, int]) -> bool:
    """Tell the kernel where the two areas lie; False where it refuses."""
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


def _in_pages(content: bytes) -> int:
    """The address of a private copy that is never freed."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, max(1, len(content)), flags=flags)
    pages.write(content)
    _kept.append(pages)
    return ctypes.addressof(ctypes.c_char.from_buffer(pages))
