"""The folder on a tmpfs that contains a node's segments, and its lock. All functions block, except
those of `Orphans` that run in the loop.

The folder's name contains the user, and hashes of job and node. An agent holds the folder's flock
as long as it runs, so if the lock is free, the agent was killed. The next agent of the same node
adopts the content. Agents of other jobs mark such a folder and remove it after a grace period. If
the machine has rebooted since, they remove it at once, because files on a disk may then be torn. No
two jobs share a path.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from msgspec.structs import replace as replaced

from elasticrun import config
from elasticrun.agent.runtime import Tasks, Timer, in_thread
from elasticrun.host.log import logger
from elasticrun.snapshots.shm.segment import round_key
from elasticrun.wire.messages import RoundInfo, Start
from elasticrun.wire.types import RoundName, plain, typed

DEFAULT_BASE: Final = "/dev/shm"

MOST_ALIKE: Final = 8
"""Number of folders tried per node, because other agents with the same node name may hold some."""

MAX_ROUNDS: Final = 256
"""Maximum number of rounds with snapshots here; each local rank has a few slots."""

MAX_ROUNDS_BYTES: Final = 4 * 1024 * 1024

SCAN_LIMIT: Final = 60.0
"""Seconds for one scan for leftovers of other agents; the kernel takes a while to free
gigabytes."""

MAX_FILES: Final = 65536
"""Maximum number of entries scanned per folder."""

LOCK: Final = "lock"
ROUNDS_FILE: Final = "lives.json"
ORPHAN: Final = "orphan"
"""Its mtime is when another agent found that the folder's agent was gone."""

_OR_NONE: Final = ("storage_from", "all_but", "base")
"""Fields of a `LocalRound` in which -1 means none."""

_NAME: Final = re.compile(r"(r?)(\d{1,7})-([0-9a-f]{16})-(\d{1,9})")


class NotOurFolder(OSError):
    """The path exists, but is not a folder of this user."""


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A segment's file."""

    path: str
    local_rank: int  # -1: a replica
    replica: int  # the rank that it replicates; -1: none
    layout: int  # Layout.key
    serial: int


@dataclass(frozen=True, slots=True)
class LocalRound:
    """A round with snapshots here, with facts that the snapshots' own records lack: this node's
    ranks, the checkpoint folder, and what the ranks restored."""

    info: RoundInfo
    first_rank: int = 0
    nproc: int = 0  # 0: no rank of it ran here
    folder: str = ""  # an absolute path or a URL; "" until a rank has reported it
    keep_last: int = 0
    keep_every: int = 0
    base: int = -1  # the step its ranks restored from, from any source; -1: unknown
    worked: bool = False  # ranks took work that is handed out, in this round or an earlier one

    @classmethod
    def of(cls, start: Start, nproc: int) -> LocalRound:
        """The record for ranks that are about to start, without the reason for the start."""
        return cls(replaced(start.info, why="", code=None), start.first_rank, nproc)

    @property
    def name(self) -> RoundName:
        return self.info.name

    @property
    def key(self) -> bytes:
        return round_key(self.name)


class SegmentFolder:
    """One node's folder, locked. Created by `take`. Content from before the last reboot is
    removed."""

    def __init__(self, path: str, lock: int, prefix: str) -> None:
        self.path = path
        self._lock = lock
        self._prefix = prefix  # prefix of the folders of this job's other nodes
        self.torn = False  # the content was from before the last reboot, and is removed
        if _is_of_another_boot(lock):
            self.torn = True
            _clear(path)
        _note_boot(lock)
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(path, ORPHAN))

    def file(self, local_rank: int, layout: int, serial: int, replica: int = -1) -> str:
        """The path of a segment; `replica`: the rank of another node that it copies."""
        owner = f"r{replica}" if replica >= 0 else str(local_rank)
        return os.path.join(self.path, f"{owner}-{layout:016x}-{serial}")

    def files(self) -> Iterator[SegmentFile]:
        """All segments in this folder."""
        for name in sorted(os.listdir(self.path))[:MAX_FILES]:
            if found := _NAME.fullmatch(name):
                rank, layout = int(found[2]), int(found[3], 16)
                owner = (-1, rank) if found[1] else (rank, -1)
                yield SegmentFile(os.path.join(self.path, name), *owner, layout, int(found[4]))

    def rounds(self) -> list[LocalRound]:
        """The rounds that the previous agent has stored; [] if they cannot be read."""
        try:
            with open(os.path.join(self.path, ROUNDS_FILE), "rb") as file:
                rows = json.loads(file.read(MAX_ROUNDS_BYTES))
            return [_checked(row) for row in rows[:MAX_ROUNDS]]
        except (OSError, ValueError, TypeError):
            return []

    def note(self, rounds: list[LocalRound]) -> None:
        """Store the newest rounds for the next agent. Raises OSError."""
        text = json.dumps([plain(one) for one in rounds[-MAX_ROUNDS:]])
        path = os.path.join(self.path, ROUNDS_FILE)
        with open(path + ".new", "w") as file:
            file.write(text)
        os.rename(path + ".new", path)

    def leave(self) -> None:
        """Release the folder with its content, for another agent."""
        os.close(self._lock)

    def remove(self, *, job_over: bool) -> None:
        """Remove the folder. If the job is over, also remove the folders of its other nodes on this
        host whose agents were killed and did not return."""
        _remove(self.path)
        os.close(self._lock)
        if job_over:
            base = os.path.dirname(self.path)
            _remove_free(base, lambda name: name.startswith(self._prefix))


def take(base: str, job_id: str, node: str, *, make: bool) -> SegmentFolder | None:
    """Lock the folder of this node. Without `make`, only an existing folder of an earlier agent;
    None if there is none. Skips a path that belongs to another user. Raises OSError."""
    ours = _job_prefix(job_id)
    taken: list[NotOurFolder] = []
    for number in range(MOST_ALIKE):
        path = os.path.join(base, f"{ours}{_hash(node)}.{number}")
        if not make and not os.path.isdir(path):
            continue
        try:
            lock = _lock(path)
        except NotOurFolder as error:
            taken.append(error)
            continue
        if lock is not None:
            return SegmentFolder(path, lock, ours)
    if make and taken:
        raise taken[0]
    if make:
        raise OSError(f"{MOST_ALIKE} agents of node {node} are running on this host")
    return None


@dataclass(frozen=True, slots=True)
class Cleaned:
    """The number of removed folders, and seconds until the next may be removed; None: no other."""

    removed: int
    due: float | None


def clean(base: str, job_id: str, grace: float, now: float) -> Cleaned:
    """Remove the folders of killed agents of this user's other jobs that were marked at least
    `grace` seconds ago, and mark those that are not marked yet. `now`: by the clock of the file
    system."""
    mine, ours = f"elasticrun-{os.getuid()}-", _job_prefix(job_id)
    waits: list[float] = []

    def is_over(path: str, lock: int) -> bool:
        left = 0.0 if _is_of_another_boot(lock) else grace - _orphaned_for(path, now)
        if left > 0:
            waits.append(left)
        return left <= 0

    removed = _remove_free(
        base, lambda name: name.startswith(mine) and not name.startswith(ours), is_over
    )
    return Cleaned(removed, min(waits, default=None))


def _orphaned_for(path: str, now: float) -> float:
    """Seconds since an agent marked this folder as orphaned. If none has, mark it and return
    0.0."""
    mark = os.path.join(path, ORPHAN)
    with contextlib.suppress(OSError):
        age = now - os.stat(mark, follow_symlinks=False).st_mtime
        if age >= 0:  # otherwise the clock was set back
            return age
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    with contextlib.suppress(OSError):
        os.close(os.open(mark, flags, 0o600))
        os.utime(mark, (now, now), follow_symlinks=False)
    return 0.0


def _boot() -> bytes:
    """The machine's boot id; b"" if unknown."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return file.read(64).strip()
    return b""


def _note_boot(lock: int) -> None:
    with contextlib.suppress(OSError):
        os.ftruncate(lock, 0)
        os.pwrite(lock, _boot(), 0)


def _is_of_another_boot(lock: int) -> bool:
    with contextlib.suppress(OSError):
        noted, boot = os.pread(lock, 64, 0), _boot()
        return bool(noted and boot) and noted != boot
    return False


def _lock(path: str) -> int | None:
    """Lock this folder, and create it if necessary; None if another agent holds it. Raises OSError,
    also if another user owns the folder."""
    for _ in range(3):  # another agent may be removing it
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise NotOurFolder(f"{path} is not a folder of this user")
        os.chmod(path, 0o700)
        lock = os.path.join(path, LOCK)
        try:
            fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.stat(lock, follow_symlinks=False), os.fstat(fd)):
                return fd
        except BlockingIOError:
            os.close(fd)
            return None
        except FileNotFoundError:
            pass
        os.close(fd)
    raise OSError(f"{path} is repeatedly removed by another process")


def _remove_free(
    base: str,
    matches: Callable[[str], bool],
    is_over: Callable[[str, int], bool] = lambda path, lock: True,
) -> int:
    """Remove the folders that no agent holds and for which `matches(name)` and
    `is_over(path, lock)` are true; returns how many."""
    removed = 0
    pattern = re.compile(rf"elasticrun-{os.getuid()}-[0-9a-f]{{12}}-[0-9a-f]{{12}}\.\d")
    with contextlib.suppress(OSError):
        for name in os.listdir(base)[:MAX_FILES]:
            path = os.path.join(base, name)
            if not pattern.fullmatch(name) or not matches(name):
                continue
            with contextlib.suppress(OSError):
                lock = _lock(path)
                if lock is not None:
                    try:
                        if is_over(path, lock):
                            _remove(path)
                            removed += 1
                    finally:
                        os.close(lock)
    return removed


def _clear(path: str) -> None:
    """Remove everything except the lock."""
    for name in os.listdir(path):
        if name != LOCK:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(path, name))


def _remove(path: str) -> None:
    """Remove the folder under its lock. The lock file is removed last, so that a process that waits
    for the lock then finds another inode."""
    with contextlib.suppress(OSError):
        _clear(path)
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(path, LOCK))
        os.rmdir(path)


def _checked(row: Any) -> LocalRound:
    found: LocalRound = typed(row, LocalRound)
    _check_numbers(plain(found))
    return found


def _check_numbers(row: dict[str, Any]) -> None:
    for name, value in row.items():
        least = -1 if name in _OR_NONE else 0
        if isinstance(value, dict):
            _check_numbers(value)
        elif isinstance(value, int) and not least <= value < 2**62:
            raise ValueError(f"{name} is {value}")


def _job_prefix(job_id: str) -> str:
    return f"elasticrun-{os.getuid()}-{_hash(job_id)}-"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class Orphans:
    """Folders that killed agents of this user's other jobs have left in `base`.

    `base` is scanned when this agent starts, and again when the grace period of the next folder has
    passed (`config.ORPHAN_GRACE`). Used in the loop's thread, except `remove_expired`."""

    def __init__(self, base: str, job_id: str) -> None:
        self._base = base
        self._job_id = job_id
        self._timer = Timer()
        self._tasks = Tasks(logger.error)

    def remove_expired(self, grace: float | None = None) -> Cleaned:
        """Remove folders whose grace period has passed, and mark new orphans; blocks."""
        grace = config.ORPHAN_GRACE if grace is None else grace
        return clean(self._base, self._job_id, grace, time.time())

    def schedule(self, due: float | None) -> None:
        """Scan again in `due` seconds; None: nothing is left."""
        self._timer.cancel()
        if due is not None:
            what = "scanning for killed agents' snapshots"
            self._timer.after(due, lambda: self._tasks.start(self._scan_again(), what))

    async def remove_now(self) -> bool:
        """Remove orphans at once, whatever their grace period, because there is no space; returns
        whether there were any."""
        try:
            found = await in_thread(
                lambda: self.remove_expired(0.0), limit=SCAN_LIMIT, name="orphans"
            )
        except (OSError, TimeoutError):
            return False
        if found.removed:
            logger.warning(
                "removed snapshots of %d killed agents of other jobs: %s was full",
                *(found.removed, self._base),
            )
        return found.removed > 0

    def close(self) -> None:
        """Stop scanning, because this agent ends; the next one scans again."""
        self.schedule(None)
        self._tasks.close()

    async def _scan_again(self) -> None:
        try:
            found = await in_thread(self.remove_expired, limit=SCAN_LIMIT, name="orphans")
        except (OSError, TimeoutError):
            return  # the next agent scans again
        self.schedule(found.due)
