"""A c10d store host as a child of the caller, for rounds whose ranks are the caller's too.

Forked where ranks are forked and the caller has torch; else executed, early, so that its import of
torch goes on while the agent starts.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
from collections.abc import Callable
from typing import Final

from elasticrun.caller.rank_process import command
from elasticrun.caller.store_main import serve

MAX_WORDS: Final = 4096
"""What it says about its start is one line of a thousand bytes."""


class StoreProcess:
    """A process that serves a store once it is told its port.

    `fileno()` is readable when it has said how that went, `pidfd` when it has ended. Raises OSError
    if it cannot be started."""

    def __init__(self, close_in_fork: Callable[[], None] | None = None) -> None:
        """Execute it; or, with `close_in_fork` (which the child calls first), fork it."""
        self._ready, ready = os.pipe()
        port, self._port = os.pipe()
        self.forked = close_in_fork is not None
        try:
            if close_in_fork is None:
                self._child = subprocess.Popen(
                    command("elasticrun.caller.store_main", port, ready, os.getpid()),
                    pass_fds=(port, ready),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
                self.pid = self._child.pid
            else:
                self._fork = multiprocessing.get_context("fork").Process(
                    target=self._in_fork, args=(port, ready, os.getpid(), close_in_fork)
                )
                self._fork.start()
                self.pid = self._fork.pid or 0
            self.pidfd = os.pidfd_open(self.pid)
        except BaseException:
            os.close(self._ready)
            os.close(self._port)
            raise
        finally:
            os.close(ready)
            os.close(port)

    def listen(self, port: int) -> None:
        """Have it listen on `port`, which the agent holds bound."""
        with contextlib.suppress(BrokenPipeError):  # it has died: `pidfd` tells
            os.write(self._port, b"%d\n" % port)

    def fileno(self) -> int:
        """The pipe on which it says how it started."""
        return self._ready

    def started(self) -> str:
        """Once readable: "" if the store listens, else what went wrong."""
        words = os.read(self._ready, MAX_WORDS).decode(errors="replace").strip()
        if words == "ok" or words.startswith("ok "):
            return ""
        return words.removeprefix("failed ") or "it ended before it listened"

    def send_signal(self, signum: int) -> None:
        """Send it a signal; nothing if it has gone."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signum)

    def close(self) -> int:
        """End it, reap it, let the fds go; its exit code, negative for a signal."""
        self.send_signal(signal.SIGKILL)
        if self.forked:
            self._fork.join()
            code = self._fork.exitcode
            self._fork.close()
        else:
            code = self._child.wait()
        self.let_go()
        return code if code is not None else 1

    def let_go(self) -> None:
        """Close our fds and leave it alone (in a fork of the caller, whose child it is not)."""
        for fd in (self.pidfd, self._ready, self._port):
            os.close(fd)

    def _in_fork(
        self, port_fd: int, ready_fd: int, parent: int, close_inherited: Callable[[], None]
    ) -> None:
        close_inherited()
        os.close(self._ready)
        os.close(self._port)
        with contextlib.suppress(PermissionError):
            os.setsid()
        serve(port_fd, ready_fd, parent)
