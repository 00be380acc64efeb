"""Ranks that are only names: who lives in which round, and which round could take a step.

A collective needs every rank of its round. So a round *steps* while all its ranks live, wherever
their agents are and whoever can hear them; that is what a script's step log would show, and on it
rests the invariant that no two worlds write at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from elasticrun.wire.messages import JobSpec
from elasticrun.wire.types import RoundName


@dataclass(slots=True)
class Rank:
    round: RoundName
    rank: int
    local_rank: int
    world_size: int
    pid: int
    on_exit: Callable[[int, str], None]  # exit code, message
    ignores_term: float = 0.0  # seconds that it takes to obey SIGTERM
    exit_on_term: int | None = None  # exit code instead of the signal's death
    leaves_within: float | None = None  # seconds to leave a round and keep its process
    alive: bool = True
    waits: bool = False  # has left its round


@dataclass(slots=True)
class Worlds:
    live: dict[RoundName, dict[int, Rank]] = field(default_factory=dict)
    stepping: dict[RoundName, None] = field(default_factory=dict)
    began: list[RoundName] = field(default_factory=list)  # rounds that ever stepped, in order
    faults: list[str] = field(default_factory=list)

    def born(self, rank: Rank) -> None:
        ranks = self.live.setdefault(rank.round, {})
        if rank.rank in ranks:
            self.faults.append(f"rank {rank.rank} lives twice in round {rank.round}")
        if rank.rank >= rank.world_size:
            self.faults.append(f"rank {rank.rank} in a world of {rank.world_size}")
        ranks[rank.rank] = rank
        if len(ranks) == rank.world_size:
            self._steps(rank.round)

    def dead(self, rank: Rank) -> None:
        ranks = self.live.get(rank.round, {})
        ranks.pop(rank.rank, None)
        self.stepping.pop(rank.round, None)
        if not ranks:
            self.live.pop(rank.round, None)

    def _steps(self, name: RoundName) -> None:
        for other in self.stepping:
            self.faults.append(f"rounds {other} and {name} step at once")
        if name in self.began:
            self.faults.append(f"round {name} steps again")
        if self.began and (name.term, name.number) <= (self.began[-1].term, self.began[-1].number):
            self.faults.append(f"round {name} steps after round {self.began[-1]}")
        self.stepping[name] = None
        self.began.append(name)


@dataclass(slots=True)
class NodeSetup:
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
    leaves: float | None = None  # they are recoverable, and leave a round in that many seconds
