"""The few system calls that Python has no name for, and what /proc knows about processes."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_MM = 35
_PR_SET_MM_MAP = 14
_PR_SET_CHILD_SUBREAPER = 36

_NO_FILE = 0xFFFFFFFF

_libc = ctypes.CDLL(None, use_errno=True)
_libc.sbrk.restype = ctypes.c_void_p


def _prctl(option: int, argument: object, third: object = 0) -> bool:
    return bool(_libc.prctl(option, argument, third, 0, 0) == 0)


def die_with_parent(signum: int) -> None:
    """Have the kernel send us `signum` when the thread that created us ends; 0: never mind."""
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signum))


def set_name(name: bytes) -> None:
    """Our name in `ps`, `top` and /proc/self/comm; the kernel keeps 15 bytes."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name[:15]))


def become_subreaper() -> bool:
    """Orphans below us become our children instead of init's. False where it cannot be."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


# ---------------------------------------------------------------- the command line


class _MemoryMap(ctypes.Structure):
    """struct prctl_mm_map of <linux/prctl.h>."""

    _fields_ = (
        ("start_code", ctypes.c_uint64),
        ("end_code", ctypes.c_uint64),
        ("start_data", ctypes.c_uint64),
        ("end_data", ctypes.c_uint64),
        ("start_brk", ctypes.c_uint64),
        ("brk", ctypes.c_uint64),
        ("start_stack", ctypes.c_uint64),
        ("arg_start", ctypes.c_uint64),
        ("arg_end", ctypes.c_uint64),
        ("env_start", ctypes.c_uint64),
        ("env_end", ctypes.c_uint64),
        ("auxv", ctypes.c_uint64),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


_kept: list[mmap.mmap] = []
"""The pages that /proc/self/cmdline and environ are read from; never freed."""


def set_command_line(argv: Sequence[bytes], environ: Sequence[bytes]) -> bool:
    """Show `argv` and `environ` as ours in /proc/self/cmdline and /proc/self/environ.

    The kernel is told where the two areas lie (no privilege needed since Linux 3.18 with
    CONFIG_CHECKPOINT_RESTORE, which distributions have): the words where the old ones were if they
    fit, since programs that set a title write there, else in new pages; the environment in new
    pages. Where the kernel refuses, the words are written over the old ones as one title, cut to
    their length. False for the latter.
    """
    arguments = b"".join(word + b"\0" for word in argv)
    variables = b"".join(word + b"\0" for word in environ)
    fields = _stat_fields()
    room = fields[49] - fields[48]
    start = fields[48] if len(arguments) <= room else _in_pages(arguments)
    end = start + len(arguments)
    env_start = _in_pages(variables)
    if _lay_out(fields, (start, end), (env_start, env_start + len(variables))):
        if start == fields[48]:
            ctypes.memmove(start, arguments.ljust(room, b"\0"), room)
        return True
    _overwrite(fields[48], fields[49], b" ".join(argv))
    return False


def set_title(title: bytes) -> None:
    """Show `title` as our command line, and our environment as before: for processes of ours, in
    the place of what they were forked from. Where the old words leave no room, nothing changes."""
    fields = _stat_fields()
    start, room = fields[48], fields[49] - fields[48]
    end = start + len(title) + 1
    if not start or len(title) + 2 > room:
        return
    if _lay_out(fields, (start, end), (fields[50], fields[51])):
        ctypes.memmove(start, title.ljust(room, b"\0"), room)
    else:
        _overwrite(start, fields[49], title)


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


def _overwrite(start: int, end: int, title: bytes) -> None:
    """A last byte that is not NUL tells the kernel that this is a title (setproctitle)."""
    room = end - start
    if start and room > 1:
        ctypes.memmove(start, title[: room - 2].ljust(room - 1, b"\0") + b".", room)


def _stat_fields() -> dict[int, int]:
    """Fields of /proc/self/stat by their numbers in proc(5)."""
    words = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    return {number: int(word) for number, word in enumerate(words[1:], start=4)}


# ---------------------------------------------------------------- processes


@dataclass(frozen=True, slots=True)
class Process:
    """One living process (not a zombie) as /proc shows it."""

    pid: int
    parent: int
    group: int
    session: int
    state: str


def read_process(pid: int) -> Process | None:
    """None if there is no such process (any more)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    words = text.rpartition(b")")[2].split()
    return Process(pid, int(words[1]), int(words[2]), int(words[3]), words[0].decode())


def descendants(root: int) -> list[Process]:
    """All processes below `root`, parents before children; zombies are left out."""
    found = [read_process(pid) for pid in _walk(root)]
    return [process for process in found if process is not None and process.state not in "ZX"]


def _walk(root: int) -> Iterator[int]:
    has_files = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
    children = _children if has_files else _Family().children
    waiting = [root]
    while waiting:
        for pid in children(waiting.pop()):
            yield pid
            waiting.append(pid)


def _children(pid: int) -> list[int]:
    """From /proc/PID/task/*/children (CONFIG_PROC_CHILDREN): no scan of the whole host."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_bytes().split())
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


class _Family:
    """Who is whose child, from one scan of /proc, for kernels without `children` files."""

    def __init__(self) -> None:
        self._below: dict[int, list[int]] = {}
        for name in os.listdir("/proc"):
            process = read_process(int(name)) if name.isdigit() else None
            if process is not None:
                self._below.setdefault(process.parent, []).append(process.pid)

    def children(self, pid: int) -> list[int]:
        return self._below.get(pid, [])


def has_thread(thread: int) -> bool:
    """Whether this process has such a thread, by its id in the kernel."""
    return os.path.exists(f"/proc/self/task/{thread}")


def thread_count() -> int:
    """Threads of this process, also those that Python knows nothing of."""
    return len(os.listdir("/proc/self/task"))
