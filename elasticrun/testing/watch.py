"""Waiting for what happens to a job: files that grow, files that appear, processes that end."""

from __future__ import annotations

import os
import select
import time
from typing import Final

from elasticrun.agent.inotify import IN_MODIFY, Inotify

IN_MOVED: Final = 0x0000_00C0  # from and to
IN_CREATE_DELETE: Final = 0x0000_0300


class Watch:
    """Wakes when something in the watched folders is written, made or removed, or a watched
    process ends. OSError where the kernel has no inotify (instance) to give."""

    def __init__(self) -> None:
        self._inotify = Inotify()
        self._poller = select.poll()
        self._poller.register(self._inotify.fileno(), select.POLLIN)
        self._ends: dict[int, int] = {}

    def folder(self, path: str) -> None:
        """Watch the files in this folder."""
        self._inotify.watch(path, IN_MODIFY | IN_MOVED | IN_CREATE_DELETE)

    def process(self, pid: int) -> None:
        """Watch for the end of a child of ours that has not been waited for."""
        fd = os.pidfd_open(pid)
        self._ends[fd] = pid
        self._poller.register(fd, select.POLLIN)

    def wait(self, limit: float) -> bool:
        """Until something happens, `limit` seconds at most; whether it did. What has happened
        since the last call counts, so nothing is missed between looking and waiting."""
        happened = self._poller.poll(max(0.0, limit) * 1000)
        for fd, _ in happened:
            if fd in self._ends:
                self._poller.unregister(fd)
                del self._ends[fd]
                os.close(fd)
            else:
                self._inotify.read()
        return bool(happened)

    def close(self) -> None:
        """Give everything back to the kernel."""
        for fd in self._ends:
            os.close(fd)
        self._ends.clear()
        self._inotify.close()


class Deadline:
    """The time by which something has to have happened."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds that are left, never less than 0."""
        return max(0.0, self._end - time.monotonic())

    def over(self) -> bool:
        """Whether it has passed."""
        return self.left() <= 0
