"""Work that is handed out, as far as the simulated world knows of it: `tests.sim.workers` plugs in
the real parts of ranks and agents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from elasticrun.wire import messages as m
from elasticrun.wire.types import RoundName

if TYPE_CHECKING:
    from tests.simulator.node import Node
    from tests.simulator.world import World


class WorkOfNode(Protocol):
    """The work of one node's ranks."""

    has_begun: bool

    def started(self, start: m.Start) -> None:
        """Ranks of a new life start."""

    def use(self, samples: int, words: list[str]) -> None:
        """Every rank uses so many samples, as far as it has leases."""

    def mark(self, step: int) -> None:
        """The living ranks are about to save this step."""

    def attached(self) -> None:
        """A master is there that may have heard nothing."""

    def grant(self, order: m.WorkGrant) -> None:
        """The master grants leases."""


class Uses(Protocol):
    """What was used in the whole world."""

    faults: list[str]

    def of_node(self, world: World, node: Node) -> WorkOfNode:
        """The part of a node that starts."""

    def store(self, key: tuple[RoundName, int], used: str) -> None:
        """A checkpoint is written, and says what was used."""
