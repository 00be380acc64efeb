"""Starts a real master process, and many agents' sessions (the crowd) in a few load processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from load import HEARTBEAT, JOB_ID, PATIENCE
from stage import TookTooLong, free_port

HERE = Path(__file__).parent
HOST = "127.0.0.1"


class Lines:
    """A child process that answers commands line by line, with a time limit. If it exits, the
    exception has the end of its stderr."""

    def __init__(self, *words: str, environ: dict[str, str] | None = None) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        self.process = subprocess.Popen(
            (sys.executable, *words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **(environ or {})},
        )
        self._rest = b""

    def ask(self, command: dict[str, Any]) -> None:
        """Send a command; `answer` returns its result."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, limit: float) -> dict[str, Any]:
        """The next answer. Raises TookTooLong if there is none within `limit` seconds, or the
        process has exited."""
        assert self.process.stdout is not None
        end = time.monotonic() + limit
        fd = self.process.stdout.fileno()
        while b"\n" not in self._rest:
            ready, _, _ = select.select([fd], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TookTooLong(f"a load process did not answer within {limit:g} s")
            data = os.read(fd, 65536)
            if not data:
                self._errors.seek(0)
                said = self._errors.read()[-2000:].decode(errors="replace")
                raise TookTooLong(f"a load process ended with {self.process.wait()}: {said}")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
        self.process.wait()
        self._errors.close()


def cpu_of(pid: int) -> float:
    """User and system seconds of a process, including threads that have ended."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


class Master:
    """`elasticrun master` for a job of `nodes` nodes, with its log in a file."""

    def __init__(self, nodes: int, words: Sequence[str] = (), heartbeat: float = HEARTBEAT) -> None:
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="elasticrun-bench-"))
        self.log = self.folder / "log"
        command = (
            *(sys.executable, *words, "-m", "elasticrun", "master"),
            *(f"--host={HOST}", f"--port={self.port}", f"--rdzv-id={JOB_ID}"),
            *(f"--nnodes={nodes}", "--max-restarts=1000", "--restart-backoff=0"),
            f"--rdzv-conf=heartbeat_timeout={heartbeat:g}",
        )
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LOGLEVEL": "INFO", "XDG_RUNTIME_DIR": str(self.folder)},
            )
        self._await_ready()

    def _await_ready(self) -> None:
        end = time.monotonic() + 120
        while "serving" not in self.log_text():
            if time.monotonic() > end or self.process.poll() is not None:
                raise TookTooLong(f"the master does not serve: {self.log_text()[-1000:]}")
            time.sleep(0.02)

    def log_text(self) -> str:
        """The master's log so far."""
        return self.log.read_text(errors="replace")

    def count(self, words: str) -> int:
        """The number of matches of this pattern in its log."""
        return len(re.findall(words, self.log_text()))

    def cpu(self) -> float:
        """CPU seconds that the master has used."""
        return cpu_of(self.process.pid)

    def rss(self) -> float:
        """The master's resident memory in MB."""
        return float(psutil.Process(self.process.pid).memory_info().rss) / 1e6

    def end(self) -> None:
        """Kill the master and remove its folder."""
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True)
class Wire:
    """Bytes on all connections of a port, in both directions, as the kernel counts (TCP_INFO)."""

    connections: int
    sent: int
    received: int

    @property
    def total(self) -> int:
        """Bytes in both directions."""
        return self.sent + self.received


def wire(port: int) -> Wire | None:
    """Bytes (TCP payload) that the open sockets of the server at `port` have transferred; None
    without `ss`. Connections that have closed are not counted."""
    command = ["ss", "-tinH", "state", "established", f"( sport = :{port} )"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    sent = sum(int(n) for n in re.findall(r"bytes_sent:(\d+)", text))
    received = sum(int(n) for n in re.findall(r"bytes_received:(\d+)", text))
    return Wire(len(re.findall(r"bytes_received:", text)), sent, received)


class Crowd:
    """Sessions of agents, spread over a few load processes."""

    def __init__(self, port: int, nodes: int, processes: int, heartbeat: float = HEARTBEAT) -> None:
        self.nodes = nodes
        first, self.loads = 0, list[Lines]()
        for number in range(processes):
            count = nodes // processes + (number < nodes % processes)
            words = (f"{HOST}:{port}", str(first), str(count), str(nodes), str(heartbeat))
            self.loads.append(Lines(str(HERE / "load.py"), *words))
            first += count

    def send(self, **command: Any) -> dict[str, Any]:
        """Send all load processes a command. Returns their merged answers. Raises TookTooLong if
        the awaited event did not occur."""
        for load in self.loads:
            load.ask(command)
        found = merge_tallies([load.answer(2 * PATIENCE) for load in self.loads])
        if found["late"]:
            raise TookTooLong(f"{command} of {self.nodes} sessions: {found}")
        return found

    def send_to_first(self, **command: Any) -> None:
        """Send only the first load process a command, and wait for its answer."""
        self.loads[0].ask(command)
        self.loads[0].answer(2 * PATIENCE)

    def cpu(self) -> float:
        """CPU seconds that the load processes have used."""
        return sum(cpu_of(load.process.pid) for load in self.loads)

    def end(self) -> None:
        """Kill the load processes."""
        for load in self.loads:
            load.end()


def merge_tallies(tallies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge tallies: the minimum of each `first_...`, the maximum of each `last_...`, the sum of
    each count."""
    made: dict[str, Any] = {}
    for name in tallies[0]:
        values = [tally[name] for tally in tallies]
        if name.startswith("first_"):
            made[name] = min(values)
        elif name.startswith("last_"):
            made[name] = max(values)
        elif isinstance(values[0], dict):
            kinds = {kind for value in values for kind in value}
            made[name] = {kind: sum(v.get(kind, 0) for v in values) for kind in sorted(kinds)}
        else:
            made[name] = sum(values)
    return made


@contextlib.contextmanager
def serving(
    nodes: int, processes: int = 2, words: Sequence[str] = (), heartbeat: float = HEARTBEAT
) -> Iterator[tuple[Master, Crowd]]:
    """Run a master and a crowd of sessions that are not attached yet; kill both at the end. Sets
    this process's limit of open files to the maximum."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    master = Master(nodes, words, heartbeat)
    try:
        crowd = Crowd(master.port, nodes, processes, heartbeat)
        try:
            crowd.send(do="tally")  # answered once the imports are done
            yield master, crowd
        finally:
            crowd.end()
    finally:
        master.end()
