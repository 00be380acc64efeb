"""What a standby has read of the world outside, and whether it would read the same now."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import time
from typing import Final

from elasticrun.forkserver.standby.rules import Read, Seen

MAX_READS: Final = 100_000
"""Maximum number of paths that one standby may read; each costs 0.4 kB and, at its start as a rank,
2 us."""

_MAX_BYTES: Final = 1024 * 1024

RACY_NS: Final = 50_000_000
"""A file that changed this recently may change again without another time stamp: those of older
kernels have steps of up to 10 ms."""

_VARYING: Final = re.compile(rb"^(cpu MHz|bogomips)\b.*$", re.MULTILINE | re.IGNORECASE)
"""Lines of /proc/cpuinfo that change all the time."""

_KERNEL: Final = ("/proc/", "/sys/", "/dev/")

State = tuple[object, ...]
"""What a read sees; empty if there is nothing at the path."""

UNSTABLE: Final[State] = ("unstable",)

_TIMED: Final = 9
"""Length of a state with the time of the last change, the last element; the number of names is the
one before."""


def look(read: Read) -> State:
    """What this read sees now."""
    try:
        if read.seen is Seen.BYTES:
            return _content(read.path)
        found = os.stat(read.path) if read.follow else os.lstat(read.path)
        if read.seen is Seen.NAMES and stat.S_ISDIR(found.st_mode):
            return (found.st_dev, found.st_ino, found.st_mode, _names(read.path))
        kind = found.st_mode
        if read.seen is Seen.EXISTENCE:
            return (stat.S_IFMT(kind),) if _is_kernels(read.path) else (found.st_ino, kind)
    except OSError as error:
        return () if isinstance(error, FileNotFoundError) else (error.errno,)
    about = (found.st_dev, found.st_ino, kind, found.st_uid, found.st_gid)
    return (*about, found.st_size, found.st_mtime_ns, found.st_nlink, found.st_ctime_ns)


def _is_kernels(path: str) -> bool:
    return path.startswith(_KERNEL)


def _content(path: str) -> State:
    with open(path, "rb", buffering=0) as file:
        data = file.read(_MAX_BYTES)
    if os.path.basename(path) == "cpuinfo":  # of all files this would cost five times the hash
        data = _VARYING.sub(b"", data)
    return (hashlib.sha256(data).digest(),)


def _names(path: str) -> bytes:
    with os.scandir(path) as found:
        entries = sorted(f"{each.is_dir(follow_symlinks=False)}{each.name}" for each in found)
    return hashlib.sha256("\0".join(entries).encode(errors="surrogateescape")).digest()


def is_racy(state: State, now_ns: int) -> bool:
    """Whether the file has changed too recently for its times to show the next change."""
    return len(state) == _TIMED and abs(now_ns - int(str(state[-1]))) < RACY_NS


def has_more_names(state: State) -> bool:
    """Whether this is a file with several hard links, of a size that can be read at once."""
    if len(state) != _TIMED:
        return False
    kind, size, names = (int(str(state[n])) for n in (2, 5, 7))
    return stat.S_ISREG(kind) and size <= _MAX_BYTES and names > 1


class Reads:
    """The reads of one standby, each with what it has seen first."""

    def __init__(self) -> None:
        self._seen: dict[Read, State] = {}
        self._contents: dict[Read, State] = {}
        """Contents of files with several names: a name more or less changes the time too. uv links
        installed files to its cache, so it does that when it makes or removes another environment
        with the same packages."""

    def __len__(self) -> int:
        return len(self._seen)

    def note(self, read: Read) -> bool:
        """Record a read that is about to happen; False if there are too many."""
        if read not in self._seen:
            state = look(read)
            self._seen[read] = UNSTABLE if is_racy(state, time.time_ns()) else state
            if has_more_names(state):
                self._contents[read] = look(read._replace(seen=Seen.BYTES))
        return len(self._seen) <= MAX_READS

    def changed(self, now: dict[Read, State]) -> str:
        """The first path that is no longer as it was; "" if all are. `now`: what was looked at for
        other standbys of this moment."""
        for read, then in self._seen.items():
            state = _looked(read, now)
            if state != then and not self._has_other_names_only(read, state, now):
                return read.path
        return ""

    def _has_other_names_only(self, read: Read, state: State, now: dict[Read, State]) -> bool:
        content = self._contents.get(read)
        if content is None or state[: _TIMED - 2] != self._seen[read][: _TIMED - 2]:
            return False
        return _looked(read._replace(seen=Seen.BYTES), now) == content


def _looked(read: Read, now: dict[Read, State]) -> State:
    state = now.get(read)
    if state is None:
        state = now[read] = look(read)
    return state
