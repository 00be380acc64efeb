"""What a test wants started: from the fixture's arguments to command lines."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from pathlib import Path
from typing import Final

from elasticrun.testing.hosts import Host

PORT: Final = 29400
"""The master's port where a host has its own network, so that it is free."""

LOOPBACK: Final = "127.0.0.1"

LOWEST_PORT: Final = 10_000
"""Below are the services that have a port of their own."""

PORT_TRIES: Final = 100
"""Ports that are looked at before the kernel is asked for any."""

_used: Final[set[int]] = set()
"""Ports that were given once; when all have been, the kernel is asked for any."""

_OTHER_PROGRAMS: Final = ("-m", "--module", "--no-python", "--no_python")


__tracebackhide__ = methodcaller("errisinstance", ValueError)  # pytest shows the line of the test


@dataclass
class Plan:
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

    @property
    def min_nodes(self) -> int:
        """The smaller number of `nnodes`."""
        return self._nnodes()[0]

    @property
    def max_nodes(self) -> int:
        """The larger one."""
        return self._nnodes()[1]

    def _nnodes(self) -> tuple[int, int]:
        low, colon, high = self.nnodes.partition(":")
        high = high if colon else low
        if not low.isdecimal() or not high.isdecimal() or int(low) < 1:
            raise ValueError(f"nnodes={self.nnodes!r}: give a number of nodes, or MIN:MAX")
        return int(low), int(high)

    def check(self) -> None:
        """ValueError with a sentence for what can never run."""
        if isinstance(self.options, str):
            raise ValueError(f"options={self.options!r}: give a list of flags")
        if self.max_nodes < self.min_nodes:
            raise ValueError(f"nnodes={self.nnodes!r}: MIN is above MAX")
        program = any(option in _OTHER_PROGRAMS for option in self.options)
        if not program and not Path(self.script).is_file():
            raise ValueError(f"there is no script {self.script!r}")

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
        self, node_id: str, options: Sequence[str], nproc_per_node: str | None
    ) -> list[str]:
        """The words after `elasticrun` that run one agent."""
        local = ("--local-addr=127.0.0.1",) if self._host == LOOPBACK else ()
        return [
            f"--nnodes={self.nnodes}",
            f"--nproc-per-node={nproc_per_node or self.nproc_per_node}",
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
