"""The kernel's own count of what its out-of-memory killer took, for ranks that died of SIGKILL."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

NEAR_US: Final = 10_000_000
"""A count that rose this long ago at most explains a death now; ranks of one job die together, and
reading the count for the first must not hide it from the second."""


class OomKills:
    """Watches the `oom_kill` counts of this process' own cgroup (v2, then v1; since Linux 5.2
    without those of the groups below it, which are other people's), or of the whole host where no
    cgroup tells. The counts at the time of making are those to compare with; one that was out of
    sight then, since this process was put into another cgroup later, began with 0."""

    def __init__(self, files: Callable[[], Iterable[Path]] | None = None) -> None:
        self._files = files or _candidates
        self._counts = {file: count for file in self._files() if (count := _read(file)) is not None}
        self._rose_us = 0

    def near(self, time_us: int) -> bool:
        """Whether the count has risen since it was last looked at, or did so near `time_us`
        (microseconds since the epoch, of the death that is to be explained)."""
        for file in self._files():
            count = _read(file)
            if count is None:
                continue
            if count > self._counts.get(file, 0):
                self._rose_us = time_us
            self._counts[file] = count
            break
        return self._rose_us > 0 and abs(time_us - self._rose_us) <= NEAR_US


def _read(file: Path) -> int | None:
    """The count in a file, None if it has none."""
    try:
        with file.open() as lines:
            for line in lines:
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
    except (OSError, ValueError):
        pass
    return None


def _candidates() -> list[Path]:
    try:
        return count_files(Path("/proc/self/cgroup").read_text())
    except OSError:
        return count_files("")


def count_files(groups: str) -> list[Path]:
    """Where the count may stand for a process in these cgroups (text as in /proc/PID/cgroup, see
    cgroups(7)), nearest first."""
    files = []
    for line in groups.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            group = Path("/sys/fs/cgroup" + path)
            files += [group / "memory.events.local", group / "memory.events"]
        elif "memory" in controllers.split(","):
            files.append(Path("/sys/fs/cgroup/memory" + path) / "memory.oom_control")
            files.append(Path("/sys/fs/cgroup/memory/memory.oom_control"))
    files.append(Path("/proc/vmstat"))
    return files
