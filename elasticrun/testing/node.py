"""One node of a job under test: its command line, its agent, the file with its console output, and
its processes.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from pathlib import Path
from typing import Final

from elasticrun.testing import processes
from elasticrun.testing.cgroups import Group
from elasticrun.testing.hosts import Host
from elasticrun.wire.env import RANK_VARIABLES, RUNS

__tracebackhide__ = methodcaller("errisinstance", ValueError)  # pytest shows the line of the test

KILL_LIMIT: Final = 60.0
"""Seconds for a process to exit after SIGKILL; a process in uninterruptible sleep may not."""

TAIL_LINES: Final = 60
"""Number of lines of a console that the report of a failed test shows."""

FOREIGN_PREFIXES: Final = ("PET_", "TORCHELASTIC_", "ELASTICRUN_", "DLROVER_", "SLURM_")
FOREIGN: Final = RANK_VARIABLES | {"NODE_RANK", "NODE_NUM", "LOGLEVEL"}
"""Variables of this process that a launcher would read as its own settings."""

ELASTICRUN: Final = (sys.executable, "-m", "elasticrun")
"""The command under test, run by the tests' interpreter."""

PORT: Final = 29400
"""The master's port on a host with its own network, where it is always free."""

LOOPBACK: Final = "127.0.0.1"

LOWEST_PORT: Final = 10_000
"""Lower ports belong to well-known services."""

PORT_TRIES: Final = 100
"""Maximum number of ports that are tried before the kernel chooses one."""

_OTHER_PROGRAMS: Final = ("-m", "--module", "--no-python", "--no_python")


def environment(scratch: Path, mark: str, more: Mapping[str, str]) -> dict[str, str]:
    """The environment of a launcher under test. `scratch`: for the host's own folders; `mark`:
    identifies the node's processes; `more`: further variables, with LOGLEVEL="" for the default
    level."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in FOREIGN and not name.startswith(FOREIGN_PREFIXES)
    }
    for folder in ("tmp", "run"):
        (scratch / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    environ = {
        **kept,
        "TMPDIR": str(scratch / "tmp"),
        "XDG_RUNTIME_DIR": str(scratch / "run"),
        RUNS: str(scratch / "runs"),
        "LOGLEVEL": "INFO",
        **more,
        processes.MARK: mark,
    }
    if not environ["LOGLEVEL"]:  # torch rejects an empty one
        del environ["LOGLEVEL"]
    return {**environ, **processes.warm_process(environ)}


@dataclass(eq=False)
class JobNode:
    """An agent, or a separate master, that a test started, and its descendants."""

    name: str
    """Its `--node-id`, and its host's name if it has its own host."""
    mark: str
    console: Path
    host: Host | None
    killed: bool = False
    """Whether the test has killed it, so that its exit code means nothing."""
    frozen: bool = False
    off: bool = False
    """Whether the test has powered off its host."""
    group: Group | None = None
    """The limits of CPU time and memory of its processes, if any."""
    command: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None

    def start(
        self, command: Sequence[str], environ: Mapping[str, str], prefix: Sequence[str]
    ) -> None:
        """Start it, or start it again after it ended. If setpriv is installed, it is killed when
        this process ends, however that happens."""
        # Not preexec_fn: no Python code may run in the child between fork and exec, because the
        # process of the tests may have threads.
        setpriv = shutil.which("setpriv")
        guard = [setpriv, "--pdeathsig", "KILL"] if setpriv else []
        limits = self.group.prefix() if self.group is not None else []
        with self.console.open("ab") as console:
            self._process = subprocess.Popen(
                [*guard, *limits, *prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env=dict(environ),
                start_new_session=True,
            )
        self.killed = self.frozen = False

    @property
    def pid(self) -> int:
        """The agent's pid."""
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The agent's exit code, as in subprocess; None while it runs."""
        return self._process.poll() if self._process is not None else None

    def output(self) -> str:
        """The standard output and error of the agent and its ranks so far."""
        return self.console.read_text(errors="replace")

    def tail(self) -> str:
        """The last lines of the output."""
        return "\n".join(self.output().splitlines()[-TAIL_LINES:])

    def pids(self, *, masters: bool = True) -> list[int]:
        """All processes of this node, or of its host if it has one of its own; without job masters
        if `masters` is false."""
        found = self.host.pids() if self.host else processes.marked(self.mark)
        return found if masters else [pid for pid in found if not processes.is_master(pid)]

    def kill(self, *, masters: bool) -> float:
        """SIGKILL all processes of this node at once (`pids`); returns the time (CLOCK_MONOTONIC).
        Raises RuntimeError if a process survives."""
        self.killed = True
        at = time.clock_gettime(time.CLOCK_MONOTONIC)
        left = processes.kill_all(lambda: self.pids(masters=masters), KILL_LIMIT)
        if left:
            raise RuntimeError(f"{self.name}: processes that SIGKILL did not end: {sorted(left)}")
        if self._process is not None:
            self._process.wait()
        return at

    def signal(self, number: int) -> float:
        """Send a signal to the agent only; after SIGKILL, wait for its end. Returns the time."""
        at = time.clock_gettime(time.CLOCK_MONOTONIC)
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
        if number == signal.SIGKILL:
            self.killed = True
            if self._process is not None:
                self._process.wait()
        return at

    def signal_everything(self, number: int, *, masters: bool) -> float:
        """Send a signal to all processes of this node (`pids`); returns the time."""
        at = time.clock_gettime(time.CLOCK_MONOTONIC)
        processes.signal_all(lambda: self.pids(masters=masters), number)
        return at

    def outcome(self) -> str:
        """How it ended, in words, or that it still runs."""
        code = self.exit_code
        if code is None:
            return "still runs"
        if self.killed:
            return "killed by the test"
        if code == 0:
            return "succeeded"
        return f"died of signal {-code}" if code < 0 else f"failed with exit code {code}"


_handed_out: Final[set[int]] = set()
"""Ports that `free_port` has already returned."""


@dataclass
class JobPlan:
    """The command lines of one job. Call `place`, which sets the master's address, before the
    methods that return commands."""

    script: str
    args: tuple[str, ...]
    nnodes: str
    nproc_per_node: str
    max_restarts: int
    options: Sequence[str]
    env: dict[str, str]
    cpus: float | None = None
    memory: int | None = None
    job_id: str = field(default_factory=lambda: f"test-{secrets.token_hex(6)}")
    _host: str = LOOPBACK
    _port: int = PORT

    def check(self) -> int:
        """Check the plan; returns the smallest number of nodes. Raises ValueError with a sentence
        for a job that can never run."""
        if isinstance(self.options, str):
            raise ValueError(f"options={self.options!r}: give a list of flags")
        low, colon, high = self.nnodes.partition(":")
        high = high if colon else low
        if not low.isdecimal() or not high.isdecimal() or int(low) < 1:
            raise ValueError(f"nnodes={self.nnodes!r}: give a number of nodes, or MIN:MAX")
        if int(high) < int(low):
            raise ValueError(f"nnodes={self.nnodes!r}: MIN is above MAX")
        program = any(option in _OTHER_PROGRAMS for option in self.options)
        if not program and not Path(self.script).is_file():
            raise ValueError(f"there is no script {self.script!r}")
        return int(low)

    def place(self, host: Host | None) -> None:
        """Put the master on this host; None: on this machine, at a port that is free now."""
        if host is not None:
            self._host, self._port = host.address, PORT
            return
        self._host, self._port = LOOPBACK, free_port()

    def master_command(self, options: Sequence[str]) -> list[str]:
        """The words after `elasticrun` that run a separate master."""
        where = (f"--host={self._host}", f"--port={self._port}", f"--rdzv-id={self.job_id}")
        return ["master", *where, *map(str, options)]

    def agent_command(
        self, node_id: str, options: Sequence[str], nproc_per_node: str | int | None
    ) -> list[str]:
        """The words after `elasticrun` that run one agent."""
        ranks = self.nproc_per_node if nproc_per_node is None else nproc_per_node
        local = ("--local-addr=127.0.0.1",) if self._host == LOOPBACK else ()
        return [
            f"--nnodes={self.nnodes}",
            f"--nproc-per-node={ranks}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self._host}:{self._port}",
            f"--rdzv-id={self.job_id}",
            f"--node-id={node_id}",
            f"--max-restarts={self.max_restarts}",
            *local,
            *map(str, self.options),
            *map(str, options),
            self.script,
            *self.args,
        ]


def free_port() -> int:
    """A loopback port that is free now. It is outside the kernel's ephemeral range, so that it is
    still free when the master binds it, which may take seconds; and neither this process nor
    another pytest-xdist worker gets it again. If no such port is found, the kernel chooses one."""
    first = LOWEST_PORT
    which, of = _worker()
    try:
        given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        given = first  # not Linux: any port
    choice = [port for port in range(first + which, given, of) if port not in _handed_out]
    for _ in range(PORT_TRIES if choice else 0):
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, port := secrets.choice(choice)))
            except OSError:
                continue
            _handed_out.add(port)
            return port
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _worker() -> tuple[int, int]:
    """The index of this process and the number of processes under pytest-xdist; (0, 1) without
    it."""
    name, count = (os.environ.get(f"PYTEST_XDIST_WORKER{more}", "") for more in ("", "_COUNT"))
    number = name.removeprefix("gw")
    if number.isdecimal() and count.isdecimal() and int(number) < int(count):
        return int(number), int(count)
    return 0, 1
