"""The agent's children: who they are, their reaping, and the sweep that leaves none behind.

The agent is a child subreaper: when its spawner dies, the ranks and all that they started become
children of the agent, which kills and reaps them. Parent-death signals would not do: they are not
inherited over a fork. The same reaping makes the agent a fair process 1 of a container.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Final

from elasticrun.system.processes import below, everybody

if TYPE_CHECKING:
    import asyncio

RESCAN: Final = 0.05
"""Seconds between looks at /proc while a sweep waits: a process may fork between look and kill."""


def _children_now() -> frozenset[int]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return frozenset()  # the common case, without a look at every process of the machine
    me = os.getpid()
    return frozenset(process.pid for process in everybody() if process.parent == me)


class Reaper:
    """Reaps every child of this process but those that were there before it."""

    def __init__(self) -> None:
        self._foreign = _children_now()
        self._watched: dict[int, Callable[[int], None]] = {}
        self._gone: asyncio.Event | None = None

    def watch(self, process: subprocess.Popen[bytes], ended: Callable[[int], None]) -> None:
        """Call `ended(code)` when this child has been reaped (negative: by that signal).

        To be called in the same turn as the start of the process, or its end may be missed."""

        def settle(code: int) -> None:
            process.returncode = code
            ended(code)

        self._watched[process.pid] = settle

    def reap(self) -> None:
        """To be called after SIGCHLD, in the loop's thread."""
        while (pid := self._next_zombie()) is not None:
            try:
                pid, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue
            if pid == 0:
                return
            settle = self._watched.pop(pid, None)
            if settle is not None:
                settle(os.waitstatus_to_exitcode(status))
        if self._gone is not None:
            self._gone.set()

    def _next_zombie(self) -> int | None:
        try:
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return None
        if info is None:
            return None
        if info.si_pid not in self._foreign:
            return info.si_pid
        # A caller's own child lies in front and is the caller's to reap: look past it.
        for process in everybody():
            if process.parent == os.getpid() and process.pid not in self._foreign:
                try:
                    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
                    if os.waitid(os.P_PID, process.pid, options) is not None:
                        return process.pid
                except ChildProcessError:
                    continue
        return None

    async def sweep(self, *, keep: Collection[int], limit: float) -> tuple[int, ...]:
        """SIGKILL and reap every descendant but `keep` (and what is below those).

        Returns the pids that are still there after `limit` seconds: the kernel keeps them."""
        import asyncio  # an agent starts its fork server before it has that

        loop = asyncio.get_running_loop()
        end = loop.time() + limit
        spared = self._foreign | set(keep)
        while True:
            self._gone = asyncio.Event()
            self.reap()
            self._gone.clear()
            left = below(os.getpid(), without=spared)
            if not left or loop.time() >= end:
                self._gone = None
                return tuple(sorted(left))
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    pass
            try:
                await asyncio.wait_for(self._gone.wait(), RESCAN)
            except TimeoutError:
                pass
