"""The kernel's own count of what its out-of-memory killer took, for ranks that died of SIGKILL."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

NEAR_US: Final = 10_000_000
"""A count that rose this long ago at most explains a death now; ranks of one job die together, and
reading the count for the first must not hide it from the second."""


class OomKills:
    """Watches the `oom_kill` counts of this process' own cgroup (v2, then v1), or of the whole host
    where no cgroup tells. The count at the time of making is the one to compare with."""

    def __init__(self, files: Iterable[Path] | None = None) -> None:
        self._files = tuple(_candidates() if files is None else files)
        self._count = self._read()
        self._rose_us = 0

    def near(self, time_us: int) -> bool:
        """Whether the count has risen since it was last looked at, or did so near `time_us`
        (microseconds since the epoch, of the death that is to be explained)."""
        count = self._read()
        if count > self._count:
            self._count = count
            self._rose_us = time_us
        return self._rose_us > 0 and abs(time_us - self._rose_us) <= NEAR_US

    def _read(self) -> int:
        for file in self._files:
            try:
                with file.open() as lines:
                    for line in lines:
                        name, _, value = line.partition(" ")
                        if name == "oom_kill":
                            return int(value)
            except (OSError, ValueError):
                continue
        return 0


def _candidates() -> list[Path]:
    files = []
    try:
        text = Path("/proc/self/cgroup").read_text()
    except OSError:
        text = ""
    for line in text.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            files.append(Path("/sys/fs/cgroup" + path) / "memory.events")
        elif "memory" in controllers.split(","):
            files.append(Path("/sys/fs/cgroup/memory" + path) / "memory.oom_control")
            files.append(Path("/sys/fs/cgroup/memory/memory.oom_control"))
    files.append(Path("/proc/vmstat"))
    return files
