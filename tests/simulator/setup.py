"""How a simulated node is started."""

from __future__ import annotations

from dataclasses import dataclass

from elasticrun.wire.messages import JobSpec


@dataclass(slots=True)
class NodeSetup:
    """How a node is started."""

    name: str
    spec: JobSpec
    nproc: int = 1
    node_rank: int = -1
    role: str = "default"
    shutdown_timeout: float = 30.0
    exit_barrier: float | None = None
    first_store: float = 1.0  # the first store waits for torch's import
    store: float = 0.05
    spawn: float = 0.005
    term: float = 0.0  # seconds that its ranks take to obey SIGTERM
    term_code: int | None = None  # their exit code then; None: die of the signal
