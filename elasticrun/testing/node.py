"""One node of a job under test: the plan of its command line, a real agent, its console in a file,
and all that runs below it.
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

from elasticrun.testing import plugin, processes
from elasticrun.testing.cgroups import Group
from elasticrun.testing.hosts import Host
from elasticrun.wire.env import RANK_VARIABLES, RUNS

__tracebackhide__ = methodcaller("errisinstance", ValueError)  # pytest shows the line of the test

KILL_LIMIT: Final = 60.0
"""Seconds for a process to be gone after SIGKILL; one in uninterruptible sleep is told about."""

TAIL_LINES: Final = 60
"""Lines of a console that a failing test shows."""

FOREIGN_PREFIXES: Final = ("PET_", "TORCHELASTIC_", "ELASTICRUN_", "DLROVER_", "SLURM_")
FOREIGN: Final = RANK_VARIABLES | {"NODE_RANK", "NODE_NUM", "LOGLEVEL"}
"""Variables of this process that a launcher would take for settings of its own."""

ELASTICRUN: Final = (sys.executable, "-m", "elasticrun")
"""The command under test, with the interpreter of the tests."""

PORT: Final = 29400
"""The master's port where a host has its own network, so that it is free."""

LOOPBACK: Final = "127.0.0.1"

LOWEST_PORT: Final = 10_000
"""Below are the services that have a port of their own."""

PORT_TRIES: Final = 100
"""Ports that are looked at before the kernel is asked for any."""

_OTHER_PROGRAMS: Final = ("-m", "--module", "--no-python", "--no_python")


def environment(scratch: Path, mark: str, more: Mapping[str, str]) -> dict[str, str]:
    """What a launcher under test is started with; `scratch` stands for the host's own folders."""
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
    return {**environ, **plugin.named(environ)}


@dataclass(eq=False)
class JobNode:
    """An agent (or a master by hand) that a test has started, and what it started in its turn."""

    name: str
    """Its `--node-id`; its host's name where it has a host of its own."""
    mark: str
    console: Path
    host: Host | None
    killed: bool = False
    """Whether the test has killed it, so that its exit code says nothing."""
    frozen: bool = False
    off: bool = False
    """Whether the test has powered its host off."""
    group: Group | None = None
    """The limits of CPU time and memory that its processes have, where they have some."""
    command: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None

    def start(
        self, command: Sequence[str], environ: Mapping[str, str], prefix: Sequence[str]
    ) -> None:
        """Start it, again where it had ended. It dies with this process, however that ends."""
        # By a program: what runs in the child between fork and exec must not be Python here, since
        # the process of the tests may have any threads.
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
        """Of the agent's process."""
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The agent's, as subprocess has it; None while it runs."""
        return self._process.poll() if self._process is not None else None

    def output(self) -> str:
        """What the agent and its ranks have written to their standard streams so far."""
        return self.console.read_text(errors="replace")

    def tail(self) -> str:
        """The last lines of that."""
        return "\n".join(self.output().splitlines()[-TAIL_LINES:])

    def pids(self, *, masters: bool = True) -> list[int]:
        """Every process of this node; all that runs on its host, where it has one of its own."""
        found = self.host.pids() if self.host else processes.marked(self.mark)
        return found if masters else [pid for pid in found if not processes.is_master(pid)]

    def kill(self, *, masters: bool) -> float:
        """SIGKILL everything of this node at once; when that was (CLOCK_MONOTONIC). A master is
        spared where `masters` is false. RuntimeError if the kernel lets something live."""
        self.killed = True
        at = time.clock_gettime(time.CLOCK_MONOTONIC)
        left = processes.kill_all(lambda: self.pids(masters=masters), KILL_LIMIT)
        if left:
            raise RuntimeError(f"{self.name}: processes that SIGKILL did not end: {sorted(left)}")
        if self._process is not None:
            self._process.wait()
        return at

    def signal(self, number: int) -> float:
        """Send a signal to the agent alone; when that was."""
        at = time.clock_gettime(time.CLOCK_MONOTONIC)
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
        if number == signal.SIGKILL:
            self.killed = True
            if self._process is not None:
                self._process.wait()
        return at

    def signal_everything(self, number: int, *, masters: bool) -> float:
        """Send a signal to every process of this node; when that was."""
        at = time.clock_gettime(time.CLOCK_MONOTONIC)
        processes.signal_all(lambda: self.pids(masters=masters), number)
        return at

    def outcome(self) -> str:
        """How it ended, in words."""
        code = self.exit_code
        if code is None:
            return "still runs"
        if self.killed:
            return "killed by the test"
        if code == 0:
            return "succeeded"
        return f"died of signal {-code}" if code < 0 else f"failed with exit code {code}"


_used: Final[set[int]] = set()
"""Ports that were given once; when all have been, the kernel is asked for any."""


@dataclass
class JobPlan:
    """One job; `place` says where its master is before a command is asked for."""

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
        """The fewest nodes; ValueError with a sentence for what can never run."""
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
        """The master is on this host; None: on this machine, at a port that is free now."""
        if host is not None:
            self._host, self._port = host.address, PORT
            return
        self._host, self._port = LOOPBACK, free_port()

    def master_command(self, options: Sequence[str]) -> list[str]:
        """The words after `elasticrun` that run the master by hand."""
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
    """A port of loopback that is free now, and that the kernel gives to nobody who connects to
    something, so that it is still free when the master gets there. Nobody else is given it by this
    process, nor by another one of pytest-xdist: it may take seconds until it is bound."""
    first = LOWEST_PORT
    which, of = _worker()
    try:
        given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        given = first  # not Linux: any port
    choice = [port for port in range(first + which, given, of) if port not in _used]
    for _ in range(PORT_TRIES if choice else 0):
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, port := secrets.choice(choice)))
            except OSError:
                continue
            _used.add(port)
            return port
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _worker() -> tuple[int, int]:
    """Which process of how many this is, as pytest-xdist says; (0, 1): the only one."""
    name, count = (os.environ.get(f"PYTEST_XDIST_WORKER{more}", "") for more in ("", "_COUNT"))
    number = name.removeprefix("gw")
    if number.isdecimal() and count.isdecimal() and int(number) < int(count):
        return int(number), int(count)
    return 0, 1
