"""The program that ssh starts on a host (`python -m elasticrun.jobs.hosts.far`).

It starts the agent detached from the connection, and reports the agent's output and exit code. If
the connection breaks, the agent continues; the next connection finds it and resumes the report
where the last one stopped.

stdin carries the order (what to start) as one line of JSON, then lines with all signals so far, and
{"done": true} at the end. stdout carries `GREETING`, then lines of JSON; {"out": n} and {"err": n}
are each followed by n bytes of the agent's output. The token appears only on stdin and in the
agent, which removes it from its environment.

An agent's folder is $XDG_STATE_HOME/elasticrun/hosts/ID (~/.local/state/...). It contains `out` and
`err`, the holder process, the number of delivered signals, and the exit code. The folder is deleted
once everything is reported.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Final

from elasticrun import __version__
from elasticrun.host.system.inotify import IN_MOVED_TO, Inotify
from elasticrun.host.system.processes import ProcessId, die_with_parent, home
from elasticrun.host.system.title import set_title
from elasticrun.wire.env import BY_SSH

GREETING: Final = f"elasticrun-far 1 {__version__}"
"""The first line of our output; earlier lines come from a shell profile."""

STREAMS: Final = ("out", "err")
MAX_ORDER: Final = 4 * 1024 * 1024
"""Maximum bytes of a line on stdin: command line, variables and token."""
CHUNK: Final = 64 * 1024
ORDER_LIMIT: Final = 180.0
"""Seconds to wait for the order: the other side must first choose the host of the rendezvous."""
BEGIN_LIMIT: Final = 30.0
"""Seconds within which the agent must have been started, by this connection or an earlier one."""
POLL_EVERY: Final = 0.5
"""Seconds between polls if inotify is not available."""
HOLDER_EVERY: Final = 10.0
"""Seconds between checks whether the process that holds the agent was killed."""
ACK_LIMIT: Final = 10
"""Seconds for the other side to acknowledge the end; then this process exits."""
KEPT: Final = 20
"""Number of folders of ended agents that are kept until they are reported; older ones are
deleted."""


def main() -> int:
    """Serve one connection. Returns 1 if no order arrives or it cannot be carried out, else 0."""
    _report_line(GREETING)
    stdin = _Lines(0)
    order = stdin.next_line(ORDER_LIMIT)
    if order is None:
        return 1
    try:
        return _AgentSession(order, stdin).run()
    except OSError as wrong:  # the connection is closed, or the disk is full
        try:
            _report({"error": f"{wrong.strerror}: {wrong.filename or 'the connection'}"})
        except OSError:
            pass
        return 1


class _Lines:
    """Reads lines of JSON from a descriptor without blocking for the end of a line."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.open = True
        self._rest = b""

    def read(self) -> None:
        """Read the available data."""
        data = os.read(self.fd, CHUNK)
        self._rest += data
        self.open = bool(data) and len(self._rest) <= MAX_ORDER

    def pop(self) -> dict[str, Any] | None:
        """The next whole line, or None if there is none yet."""
        line, newline, rest = self._rest.partition(b"\n")
        if not newline:
            return None
        self._rest = rest
        return dict(json.loads(line))

    def next_line(self, limit: float) -> dict[str, Any] | None:
        """Wait for the next line. Returns None at EOF, for a line that is too long, or if nothing
        arrives for `limit` seconds."""
        while (found := self.pop()) is None and self.open:
            if not select.select([self.fd], [], [], limit)[0]:
                return None
            self.read()
        return found


class _AgentSession:
    """One connection to one agent."""

    def __init__(self, order: dict[str, Any], stdin: _Lines) -> None:
        self._order = order
        self._stdin = stdin
        self._folder = _hosts_folder(os.environ) / str(order["id"])
        self._files: dict[str, IO[bytes]] = {}

    def run(self) -> int:
        if not Path(self._order["cwd"]).is_dir():
            _report({"error": f"there is no folder {self._order['cwd']} on this host"})
            return 1
        _sweep(self._folder.parent)
        if _claim(self._folder):  # otherwise an earlier connection has started it
            _start(self._folder, self._order)
        _report({"follows": True})
        self._signal(self._order["signals"])
        for name in STREAMS:
            self._files[name] = (self._folder / name).open("rb")
            self._files[name].seek(self._order["told"][name])
        ended = self._follow()
        if ended is None:
            return 0
        while self._report_output():
            pass
        _report(ended)
        signal.alarm(ACK_LIMIT)  # ends this process: the other side may no longer answer
        while (line := self._stdin.next_line(ACK_LIMIT)) is not None:
            if line.get("done"):
                shutil.rmtree(self._folder, ignore_errors=True)
        return 0

    def _follow(self) -> dict[str, Any] | None:
        """Report output until the agent ends. Returns how it ended; None if the connection ends
        first."""
        poller = select.poll()
        poller.register(self._stdin.fd, select.POLLIN)
        watch = _watch(self._folder)
        if watch is not None:
            poller.register(watch.fileno(), select.POLLIN)
        while (ended := _end_of(self._folder)) is None:
            wait = 0.0 if self._report_output() else POLL_EVERY if watch is None else HOLDER_EVERY
            for fd, _ in poller.poll(wait * 1000):
                if watch is not None and fd == watch.fileno():
                    watch.read()
                elif not self._read_orders():
                    return None
        return ended

    def _read_orders(self) -> bool:
        """Read the other side's lines; False at EOF."""
        self._stdin.read()
        while (line := self._stdin.pop()) is not None:
            self._signal(line.get("signals", []))
        return self._stdin.open

    def _signal(self, signals: list[int]) -> None:
        """Send the agent those signals that it has not yet received. `signals`: all so far."""
        holder = _holder(self._folder)
        agent = ProcessId() if holder is None else holder["agent"]
        if not (agent.is_local and agent.is_alive()):
            return
        had = self._folder / "signals"
        count = int(had.read_text()) if had.exists() else 0
        for number in signals[count:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent.pid, number)
        had.write_text(str(max(count, len(signals))))

    def _report_output(self) -> bool:
        """Report some new output. Returns whether there may be more."""
        more = False
        for name, file in self._files.items():
            if data := file.read(CHUNK):
                _report({name: len(data)}, data)
                more = True
        return more


def _watch(folder: Path) -> Inotify | None:
    try:
        watch = Inotify()
        watch.watch(str(folder), IN_MOVED_TO)
        for name in STREAMS:
            watch.watch(str(folder / name))
    except OSError:
        return None
    return watch


def _claim(folder: Path) -> bool:
    """Create the agent's folder; False if it exists."""
    part = folder.with_name(f"{folder.name}.{os.getpid()}")
    part.mkdir(mode=0o700)
    for name in STREAMS:
        (part / name).touch(mode=0o600)
    try:
        part.rename(folder)
    except OSError as wrong:
        shutil.rmtree(part)
        if wrong.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _hosts_folder(environ: Mapping[str, str]) -> Path:
    state = environ.get("XDG_STATE_HOME", "")
    base = Path(state) if state.startswith("/") else home() / ".local/state"
    folder = base / "elasticrun" / "hosts"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _sweep(folders: Path) -> None:
    """Remove folders of ended agents, except the KEPT newest."""
    ended = [path for path in folders.iterdir() if _end_of(path) is not None]
    ended.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in ended[KEPT:]:
        shutil.rmtree(path, ignore_errors=True)


def _start(folder: Path, order: Mapping[str, Any]) -> None:
    """Start the agent as the child of a process in a session of its own, the holder, which waits
    for it and records its exit code. Returns once the agent has started or failed to."""
    read_end, write_end = os.pipe()
    if os.fork():
        os.close(write_end)
        select.select([read_end], [], [], BEGIN_LIMIT)  # started, or failed to start
        os.close(read_end)
        return
    os.close(read_end)
    code = 1
    try:
        os.setsid()
        set_title(b"elasticrun: waits for the agent")
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # unlike SIG_IGN, reset by exec
        for fd, path in enumerate((Path(os.devnull), *(folder / name for name in STREAMS))):
            file = os.open(path, os.O_RDWR | os.O_APPEND)
            os.dup2(file, fd)
            os.close(file)
        agent = subprocess.Popen(
            [sys.executable, "-P", "-m", "elasticrun", *order["argv"]],
            env=_variables(order),
            cwd=order["cwd"],
            preexec_fn=lambda: die_with_parent(signal.SIGTERM),
        )
        pids = {"holder": os.getpid(), "agent": agent.pid}
        held = {name: asdict(ProcessId.of(pid)) for name, pid in pids.items()}
        _write(folder / "holder", json.dumps(held))
        os.close(write_end)
        code = agent.wait()
    except BaseException as wrong:
        os.write(2, f"elasticrun: the agent cannot be started: {wrong}\n".encode())
    finally:
        _write(folder / "code", str(code if code >= 0 else 128 - code))
        os._exit(0)


def _variables(order: Mapping[str, Any]) -> dict[str, str]:
    """This host's variables, those in the order, and the token, which the agent removes at once."""
    environ = {**os.environ, **order["variables"], "ELASTICRUN_TOKEN": order["token"]}
    environ[BY_SSH] = "1"
    here = os.path.dirname(sys.executable)  # as in an activated environment
    environ["PATH"] = f"{here}:{environ['PATH']}" if environ.get("PATH") else here
    return environ


def _write(path: Path, text: str) -> None:
    """Write the file atomically."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


def _holder(folder: Path) -> dict[str, ProcessId] | None:
    """The holder and its agent; None if not written, or written by another version."""
    try:
        held = json.loads((folder / "holder").read_text())
        return {name: ProcessId(**held[name]) for name in ("holder", "agent")}
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _end_of(folder: Path) -> dict[str, Any] | None:
    """How an agent ended: {"code": n}, {"lost": true} if unknown; None: it has not ended."""
    code, holder = folder / "code", _holder(folder)
    if holder is None:
        there = time.time() - folder.stat().st_mtime < BEGIN_LIMIT
    else:
        there = holder["holder"].is_alive() is not False
    if code.exists():  # checked last: it is written before the holder exits
        return {"code": int(code.read_text())}
    return None if there else {"lost": True}


def _report(head: Mapping[str, Any], data: bytes = b"") -> None:
    _send(json.dumps(head).encode() + b"\n" + data)


def _report_line(text: str) -> None:
    _send(text.encode() + b"\n")


def _send(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    sys.exit(main())
