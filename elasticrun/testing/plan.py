"""What a test wants started: from the fixture's arguments to command lines."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from elasticrun.testing.hosts import Host

PORT: Final = 29400
"""The master's port where a host has its own network, so that it is free."""

LOOPBACK: Final = "127.0.0.1"

_OTHER_PROGRAMS: Final = ("-m", "--module", "--no-python", "--no_python")


@dataclass
class Plan:
    """One job; `place` says where its master is before a command is asked for."""

    script: str
    args: tuple[str, ...]
    nnodes: str
    nproc_per_node: str
    max_restarts: int
    options: tuple[str, ...]
    env: dict[str, str]
    job_id: str = field(default_factory=lambda: f"test-{secrets.token_hex(6)}")
    _host: str = LOOPBACK
    _port: int = PORT

    @property
    def min_nodes(self) -> int:
        """The smaller number of `nnodes`."""
        low = self.nnodes.partition(":")[0]
        if not low.isdecimal() or int(low) < 1:
            raise ValueError(f"nnodes={self.nnodes!r}: give a number of nodes, or MIN:MAX")
        return int(low)

    def check(self) -> None:
        """ValueError with a sentence for what can never run."""
        _ = self.min_nodes
        program = any(option in _OTHER_PROGRAMS for option in self.options)
        if not program and not Path(self.script).is_file():
            raise ValueError(f"there is no script {self.script!r}")

    def place(self, host: Host | None) -> None:
        """The master is on this host; None: on this machine, at a port that is free now."""
        if host is not None:
            self._host, self._port = host.address, PORT
            return
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            self._host, self._port = LOOPBACK, int(probe.getsockname()[1])

    def master_command(self, options: Sequence[str]) -> list[str]:
        """The words after `elasticrun` that run the master by hand."""
        where = (f"--host={self._host}", f"--port={self._port}", f"--rdzv-id={self.job_id}")
        return ["master", *where, *options]

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
            *self.options,
            *options,
            self.script,
            *self.args,
        ]
