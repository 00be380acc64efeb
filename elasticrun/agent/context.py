"""What the parts of a node share, and how they take part in the life of its ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from elasticrun.agent.link.identity import Identity
from elasticrun.config import AgentConfig
from elasticrun.core import events as fx
from elasticrun.wire.types import mint_incarnation

if TYPE_CHECKING:
    from elasticrun.agent.boot import Reaper
    from elasticrun.agent.link.link import Link
    from elasticrun.host.log import StderrWriter
    from elasticrun.wire.messages import Start


class NodePart(Protocol):
    """Hears the life of the ranks, as it happens."""

    def round_began(self, start: Start) -> None:
        """Ranks of this round are about to be started."""

    def ranks_stopping(self) -> None:
        """They are being stopped, or the first of them has failed."""

    def ranks_gone(self, *, done: bool) -> None:
        """None of them is left. `done`: all have ended with 0; the round may go on elsewhere."""

    def close(self) -> None:
        """The agent ends, and no process of a rank is left."""


@dataclass
class NodeContext:
    """What the parts of a node share. What is found out later is an attribute."""

    config: AgentConfig
    deliver: Callable[[fx.AgentEvent], None]
    """Tells the node's state machine."""
    fatal: Callable[[str], None]
    """Ends the node with this sentence."""
    reaper: Reaper
    writer: StderrWriter
    identity: Identity = field(default_factory=lambda: Identity("", None))
    incarnation: str = field(default_factory=mint_incarnation)
    host: str = ""
    """This host's name for people."""
    address: str = ""
    """What other nodes dial."""
    link: Link = field(init=False, repr=False)
    parts: list[NodePart] = field(default_factory=list)
    """In the order in which they hear what happens."""
