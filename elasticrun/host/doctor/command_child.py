"""Runs a shell command with a time limit and prints how it ended as one JSON object.

    python -I -S command_child.py LIMIT COMMAND

{"code": its exit code, negative if a signal ended it, null after LIMIT seconds,
 "line": the first line of its standard output; without one, the last of its standard error,
 "left": pids of processes that survived SIGKILL}

Every process that the command has started is killed when the command ends, when its time is over,
and when our standard input ends, because the process that started us is gone. We are a subreaper,
so a process that has left the command's session is found as well.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time

if __name__ == "__main__":  # run by path, wherever the package is
    sys.path.insert(0, os.path.abspath(f"{__file__}/../../../.."))

from elasticrun.host.system.processes import become_subreaper, die_with_parent
from elasticrun.host.system.sweep import kill_everything

MAX_LINE = 300
"""Maximum length of the line in characters."""

MAX_KEPT = 4096
"""Bytes of each stream that are kept: the first of standard output, the last of standard error."""

PIECE = 64 * 1024
KILL_LIMIT = 2.0
"""Seconds to wait for killed processes; one in uninterruptible sleep is left behind."""


def command(limit: float, text: str) -> list[str]:
    """The command line that runs `text` for `limit` seconds at most. Its standard input must be a
    pipe that ends with its owner."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(limit), text]


class CommandOutput:
    """The beginning of the command's standard output, and the end of its standard error."""

    def __init__(self, out: int, err: int) -> None:
        self._out, self._err = out, err
        self.open = {out, err}
        self._kept = {out: bytearray(), err: bytearray()}
        for fd in (out, err):
            os.set_blocking(fd, False)

    def read(self, fd: int) -> None:
        """Read what has arrived, at most one piece."""
        try:
            piece = os.read(fd, PIECE)
        except BlockingIOError:
            return
        if not piece:
            self.open.discard(fd)
        kept = self._kept[fd]
        if fd == self._out:
            kept += piece[: MAX_KEPT - len(kept)]
        else:
            kept += piece
            del kept[:-MAX_KEPT]

    def line(self) -> str:
        """The line that says most."""
        texts = [self._kept[fd].decode(errors="replace") for fd in (self._out, self._err)]
        out, err = ([one.strip() for one in text.splitlines() if one.strip()] for text in texts)
        found = out[0] if out else err[-1] if err else ""
        return "".join(char if char.isprintable() else " " for char in found)[:MAX_LINE]


def start(text: str) -> tuple[int, CommandOutput]:
    """Start the command in a session of its own; returns its pid."""
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    nothing = os.open(os.devnull, os.O_RDONLY)
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            die_with_parent(signal.SIGKILL)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and exec keeps that
            for fd, target in ((nothing, 0), (out_write, 1), (err_write, 2)):
                os.dup2(fd, target)
            os.execv("/bin/sh", ["/bin/sh", "-c", text])
        finally:
            os._exit(127)
    for fd in (out_write, err_write, nothing):
        os.close(fd)
    return pid, CommandOutput(out_read, err_read)


def run(text: str, limit: float) -> dict[str, object] | None:
    """How the command ended; None if nobody waits for that any more."""
    end = time.monotonic() + limit
    pid, streams = start(text)
    ended = os.pidfd_open(pid)
    while (left := end - time.monotonic()) > 0:
        poller = select.poll()
        for fd in (0, ended, *streams.open):
            poller.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poller.poll(left * 1000)}
        for fd in ready & streams.open:
            streams.read(fd)
        if ended in ready:
            _, status = os.waitpid(pid, 0)
            for fd in tuple(streams.open):
                streams.read(fd)
            return {"code": os.waitstatus_to_exitcode(status), "line": streams.line()}
        if 0 in ready and not os.read(0, PIECE):
            return None
    return {"code": None, "line": streams.line()}


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    become_subreaper()
    answer = run(argv[1], float(argv[0]))
    left = kill_everything(KILL_LIMIT)
    if answer is not None:
        print(json.dumps({**answer, "left": left}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
